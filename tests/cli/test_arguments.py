"""What users write and what the shell completes: keys, files, options that are keys, a model's config.json."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.cli.arguments import EXAMPLES, folder_of, offered
from mtrain.config.keys import described_keys
from tests.cli.command_line import call, command, parsed
from tests.paths import ROOT

KEYS = [key for key in described_keys() if "[]" not in key.name and "NAME" not in key.name]


@pytest.mark.parametrize("words", [[], *(name.split() for name in EXAMPLES)], ids=" ".join)
def test_h_means_help_everywhere(words: list[str]) -> None:
    assert call(*words, "-h") == call(*words, "--help")
    assert call(*words, "-h")[0] == 0


def test_every_key_is_reached_by_completion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typing any part of a key and accepting the completion of each section leads to the key."""
    monkeypatch.chdir(tmp_path)
    drawn = random.Random(6)
    for key in drawn.sample(KEYS, 40):
        size = drawn.randint(0, len(key.name) - 1)
        typed = key.name[:size]
        for _ in range(key.name.count(".") + 2):
            typed = next(each for each in offered(typed) if f"{key.name}=".startswith(each) or each == f"{key.name}.")
            if typed.rstrip("=.") == key.name:
                break
        assert typed == key.name + ("." if key.is_section else "=")


def test_files_and_folders_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs" / "more").mkdir(parents=True)
    for name in ("run.yaml", "model.yml", "notes.txt", ".hidden.yaml"):
        (tmp_path / "configs" / name).touch()
    monkeypatch.chdir(tmp_path)
    assert offered("conf") == ["configs/"]
    assert offered("configs/") == ["configs/more/", "configs/model.yml", "configs/run.yaml"]
    assert offered("configs/ru") == ["configs/run.yaml"]
    assert offered(f"{tmp_path}/configs/r") == [f"{tmp_path}/configs/run.yaml"]
    assert offered("no/such/") == []


def test_the_shell_gets_them() -> None:
    for typed, wanted in (
        ("mtrain check train.num_", "train.num_steps="),
        ("mtrain launch local layout.t", "layout.tp="),
    ):
        asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_MTRAIN_COMPLETE": "complete_bash"}
        done = subprocess.run(
            [sys.executable, "-m", "mtrain"],
            env=os.environ | asked,
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        )
        assert wanted in done.stdout.splitlines()


TAKE_KEYS = [
    name.split() for name in EXAMPLES if any("key=value" in str(each.metavar) for each in command(*name.split()).params)
]


@pytest.mark.parametrize("words", TAKE_KEYS, ids=" ".join)
def test_an_option_that_is_a_key_is_rewritten(words: list[str]) -> None:
    """Draws keys whose last part is no option of the verb."""
    own = {option for each in command(*words).params for option in each.opts}
    keys = [
        key for key in KEYS if not key.is_section and f"--{key.name.rpartition('.')[2].replace('_', '-')}" not in own
    ]
    drawn = random.Random(" ".join(words))
    for key in drawn.sample(keys, 3):
        short = key.name.rpartition(".")[2]
        option = drawn.choice((f"--{short}", f"--{short.replace('_', '-')}", f"--{key.name}"))
        given = drawn.choice(([option, "5"], [f"{option}=5"]))
        code, text = call(*words, "run.yaml", *given)
        assert code == 2
        assert f"No such option: {option}; write " in text
        assert f"{key.name}=5" in text


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--num-steps", "5"], "; write train.num_steps=5\n"),
        (["--num-step=5"], "; write train.num_steps=5\n"),
        (["--sp"], "; write layout.sp=...\n"),
        (["--sp", "configs/model/tiny.yaml"], "; write layout.sp=...\n"),
        (["--lr", "-1"], "; write optimizer.lr=-1\n"),
        (["--nonsense", "5"], "No such option: --nonsense\n"),
    ],
)
def test_how_an_option_is_rewritten(given: list[str], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, text = call("train", *given)
    assert (code, text.endswith(shown)) == (2, True), text


def test_an_export_takes_its_folders_by_position_or_by_option() -> None:
    for line in ("run out", "run --out out", "--checkpoint run --out out"):
        code, text = call("convert", "export", *line.split())
        assert (code, "run is neither a checkpoint" in text) == (3, True), text
    for line, missing in (("run", "OUT or --out"), ("--out out", "CHECKPOINT or --checkpoint")):
        code, text = call("convert", "export", *line.split())
        assert (code, missing in text, "mtrain convert export CHECKPOINT OUT" in text) == (2, True, True), text
    code, text = call("convert", "export", "run", "out", "--checkpoint", "other")
    assert (code, "other and run are both given" in text) == (2, True), text


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("generate {}", "model"),
        ("verify rollout {} --rollouts r.jsonl", "model"),
        ("convert export run out --model {}", "model"),
        ("convert export run out --like {}", "like"),
        ("convert verify --checkpoint run --hf {}", "hf"),
        ("convert inspect {}", "path"),
        ("inspect show {}", "path"),
    ],
)
def test_a_config_json_stands_for_its_folder(line: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert parsed(line.format(tmp_path / "config.json"))[name] == tmp_path
    assert parsed(line.format(tmp_path))[name] == tmp_path
    assert parsed(line.format(tmp_path / "other" / "config.json"))[name] == tmp_path / "other" / "config.json"
    assert folder_of(None) is None
