"""Ctrl-C ends every verb with one sentence, and a verb without ranks speaks in any launcher's environment."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from mtrain.cli.main import VERBS, app
from tests.cli.command_line import call, command
from tests.config.samples import content
from tests.config.yaml_files import write
from tests.fault_table import Notice
from tests.pool import Pool
from tests.warm import completed

HOLDS_SIGNALS = (("train",), ("launch", "local"))
"""Verbs that a single Ctrl-C asks to stop (docs/machines/stopping.md)."""
OF_RANKS = ("train", "generate", "serve", "eval")
NEEDS_NOTHING = ("verify", "machine")
"""A verb that would run here: it checks this machine. tests/verify/machine shows what it says inside a job."""
INTERRUPTED = """
import os, signal, sys
place, left = sys.argv[1], [int(sys.argv[2])]


def interrupt(event, arguments):
    if left[0] and event == "open" and place in str(arguments[0]):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGINT)


sys.addaudithook(interrupt)
sys.argv[1:] = sys.argv[3:]
from mtrain.__main__ import main

main()
"""
"""Program that gets Ctrl-C when it opens a file of that name for the n-th time."""


def leaves(found: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields every verb of the command line, including nested ones."""
    found = typer.main.get_command(app) if found is None else found
    for name in found.commands:
        inner = found.get_command(None, name)
        if hasattr(inner, "commands"):
            yield from leaves(inner, (*words, name))
        else:
            yield (*words, name)


ALL = tuple(leaves())


def interrupted(tmp_path: Path, place: str, number: int, *words: object) -> tuple[int, str]:
    (program := tmp_path / "interrupted.py").write_text(INTERRUPTED)
    command_line = [sys.executable, str(program), place, str(number), *words]
    if words[0] in OF_RANKS:  # whose file a warm process has opened before
        done = subprocess.run(list(map(str, command_line)), cwd=tmp_path, capture_output=True, text=True, check=False)
    else:
        done = completed(command_line, tmp_path)
    return done.returncode, done.stderr


def test_all_verbs_are_there() -> None:
    assert {words[0] for words in ALL} == {name for group in VERBS.values() for name in group}


@pytest.mark.fault(
    "signals",
    "Ctrl-C while a verb other than train and launch loads, or reads its input",
    happens="one sentence; no traceback",
    exit_code=130,
)
@pytest.mark.parametrize("words", [words for words in ALL if words not in HOLDS_SIGNALS], ids=" ".join)
def test_an_interrupt_while_a_verb_loads(pool: Pool, tmp_path: Path, words: tuple[str, ...], notice: Notice) -> None:
    with notice:
        found = interrupted(tmp_path, "/mtrain/cli/", 1, *words, "--help")
    assert found == (notice.exit_code, f"interrupted: mtrain {words[0]} has not finished\n")


READS = {
    "check": ("check", "config.yaml", "--world-size", "1"),
    "convert": ("convert", "import", "--hf", "hf", "--out", "out"),
    "tokenize": ("tokenize", "text.txt", "--tokenizer", "hf", "--output-prefix", "out"),
    "train-tokenizer": ("train-tokenizer", "text.txt", "--output", "out", "--vocab-size", "300"),
    "verify": ("verify", "parity", "config.yaml"),
    "show-batch": ("show-batch", "config.yaml"),
    "plan": ("plan", "config.yaml", "--gpus", "8"),
}
READ_FIRST = {"convert": "config.json", "tokenize": "tokenizer.json", "train-tokenizer": "text.txt"}
"""First input of a verb that does not read a configuration."""


@pytest.mark.parametrize("verb", READS)
def test_an_interrupt_while_a_verb_reads(pool: Pool, tmp_path: Path, verb: str) -> None:
    write(tmp_path / "config.yaml", content(run__dir=str(tmp_path / "run")))
    (tmp_path / "text.txt").write_text("some words\n" * 100)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    code, errors = interrupted(tmp_path, READ_FIRST.get(verb, "config.yaml"), 1, *READS[verb])
    assert (code, errors) == (130, f"interrupted: mtrain {verb} has not finished\n")
    assert not list(tmp_path.glob("out*"))


NOWHERE = "/dev/null/nosuch"
"""Path that can neither be read nor created."""


def with_nothing_there(words: tuple[str, ...]) -> list[str]:
    """Completes the verb with all required arguments: numbers, and paths at which nothing is or can be."""
    verb, found = command(*words), list(words)
    options = inspect.signature(verb.callback).parameters
    for each in verb.params:
        if each.required:
            value = "300" if typing.get_args(options[each.name].annotation)[:1] == (int,) else NOWHERE
            found += [value] if each.param_type_name == "argument" else [max(each.opts, key=len), value]
    return found


@pytest.mark.fault(
    "input",
    "a fault of a verb without ranks, called where RANK or SLURM_PROCID is set, as inside a job",
    happens="it speaks as anywhere else",
    exit_code=2,
)
def test_a_verb_without_ranks_always_speaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, notice: Notice) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    alone = {
        words: call(*with_nothing_there(words)) for words in ALL if words[0] not in OF_RANKS and words != NEEDS_NOTHING
    }
    for name, value in (("RANK", "1"), ("SLURM_PROCID", "3")):
        with monkeypatch.context() as environment, notice:
            environment.setenv(name, value)
            within = {words: call(*with_nothing_there(words)) for words in alone}
        assert within == alone, name
    assert alone[("check",)][0] == notice.exit_code
    assert all("rror" in text for _, text in alone.values()), alone
