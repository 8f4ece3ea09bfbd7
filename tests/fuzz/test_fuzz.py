"""A few mutated inputs of every target, and that the frame finds every way of breaking the promise."""

import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fuzz import fuzzing
from tests.fuzz.fuzzing import fuzz, keep_input
from tests.fuzz.mutations import mutated_bytes, mutated_tree
from tests.fuzz.target import target_names
from tests.paths import ROOT


@pytest.mark.parametrize(
    ("examples", "fewest"),
    [(8, 1), pytest.param(100, 5, marks=pytest.mark.nightly)],  # further inputs of the same targets
)
@pytest.mark.parametrize("name", target_names())
def test_a_mutated_input_is_accepted_or_refused_by_one_message(name: str, examples: int, fewest: int) -> None:
    result = fuzz(name, examples, seed=0)
    assert [f"{name} --first {finding.number}: {finding.text}" for finding in result.found] == []
    assert result.accepted + result.refused == examples
    assert min(result.accepted, result.refused) >= fewest, "the mutations change too little, or too much"


@pytest.mark.parametrize(("name", "kind"), [("ACCEPTS", "accepted"), ("WORKS", "accepted"), ("REFUSES", "refused")])
def test_a_kept_promise_is_no_finding(name: str, kind: str) -> None:
    result = fuzz(f"tests.fuzz.planted:{name}", 2, seed=0)
    assert (getattr(result, kind), result.found) == (2, [])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OTHER_ERROR", "RecursionError"),
        ("OTHER_CODE", "exit code 3"),
        ("NO_WORDS", "a message of 0 lines"),
        ("LONG_MESSAGE", "a message of 1 lines, 100000 characters"),
        ("MEMORY", "MiB of memory"),
        ("TOO_MUCH_MEMORY", "MemoryError"),
        ("EXIT", "SystemExit"),
        ("CRASH", "the process ended with -6"),
        ("BUSY", "too much processor time"),
        ("WAITS", "no answer in 1 s"),
    ],
)
def test_a_broken_promise_is_found(monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    if name == "WAITS":
        monkeypatch.setattr(fuzzing, "WALL_SECONDS", 1.0)
    (finding,) = fuzz(f"tests.fuzz.planted:{name}", 1, seed=0).found
    assert finding.text.startswith(words) or words in finding.text.splitlines()[0]


@pytest.mark.nightly  # the tool alone; by day it finds memory of a smaller process, above
def test_memory_is_measured_below_a_process_that_has_more() -> None:
    large = bytearray(b"1") * (600 << 20)  # a child's getrusage begins with what its parent had
    (finding,) = fuzz("tests.fuzz.planted:MEMORY", 1, seed=0).found
    assert "MiB of memory" in finding.text
    assert len(large) > 0


def test_a_campaign_goes_on_after_a_crash() -> None:
    assert [finding.number for finding in fuzz("tests.fuzz.planted:CRASH", 3, seed=0, first=5).found] == [5, 6, 7]


@pytest.mark.parametrize("name", target_names())
def test_a_seed_and_a_number_repeat_an_input(name: str, tmp_path: Path) -> None:
    for index in range(3):
        one, other = tmp_path / f"one{index}", tmp_path / f"other{index}"
        keep_input(name, 7, index, one)
        keep_input(name, 7, index, other)
        assert contents(one) == contents(other)
    assert contents(tmp_path / "one0") != contents(tmp_path / "one1")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_mutations_leave_their_input_alone_and_change_most_copies() -> None:
    tree = {"a": [1, {"b": "x"}], "c": {"d": 2.0}}
    data = b'{"a": [1, 2], "b": "text"}'
    kept = str(tree)
    trees = [mutated_tree(tree, Random(seed)) for seed in range(300)]
    texts = [mutated_bytes(data, Random(seed)) for seed in range(300)]
    assert str(tree) == kept
    assert sum(str(each) != kept for each in trees) > 250
    assert sum(each != data for each in texts) > 250


def test_mutations_take_any_input() -> None:
    for seed in range(300):
        trees: tuple[Any, ...] = ({}, [], None)
        for tree in trees:
            mutated_tree(tree, Random(seed))  # raises nothing
        assert isinstance(mutated_bytes(b"", Random(seed)), bytes)


def test_the_tool_names_the_input_that_broke_a_promise(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "tools" / "fuzz.py")]
    done = subprocess.run([*program, "config", "--examples", "2"], capture_output=True, text=True, check=False)
    assert "config: " in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].endswith("0 findings")
    assert done.returncode == 0
