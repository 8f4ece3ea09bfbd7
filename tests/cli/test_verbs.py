"""Every verb: what it takes, what it says of bad input, and that its name of 0.1.0 still works."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtrain.cli.verify import on_several_ranks
from mtrain.config.schema.train import Device
from mtrain.verify.planted.inject import BACKEND_FAULTS, FAULTS, MACHINE_FAULTS, PREEMPT_FAULTS, RESUME_FAULTS, Fault
from tests.cli.command_line import call, command, options
from tests.config.samples import config
from tests.fault_table import Notice
from tests.paths import ROOT
from tests.warm import completed, program_environment

HEAVY = "{'torch', 'megatron', 'numpy', 'pydantic', 'yaml', 'matplotlib', 'transformers'}"


def modules_loaded_by(*arguments: str) -> str:
    program = f"""
import runpy, sys
try:
    runpy.run_module("mtrain", run_name="__main__")
except SystemExit as end:
    print(end.code, *sorted({HEAVY} & sys.modules.keys()), file=sys.stderr)
"""
    command_line = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command_line, capture_output=True, text=True, cwd=ROOT, timeout=600, check=True)
    return done.stderr.splitlines()[-1]


def test_help_loads_neither_the_schema_nor_torch() -> None:
    assert modules_loaded_by("--help") == "0"


def test_check_loads_neither_torch_nor_numpy() -> None:
    files = ("configs/model/tiny.yaml", "configs/run/pretrain.yaml")
    code, *loaded = modules_loaded_by("check", *files, "--world-size", "2", "--without-files").split()
    assert code == "0"
    assert {"torch", "megatron", "numpy", "matplotlib", "transformers"}.isdisjoint(loaded)
    code, *loaded = modules_loaded_by("check", *files, "--world-size", "2").split()
    assert code == "3", "there is no data/corpus"
    assert {"torch", "megatron", "matplotlib", "transformers"}.isdisjoint(loaded)


MISSING = (
    "tokenize nowhere --tokenizer x --output-prefix p",
    "train-tokenizer nowhere --output x.model --vocab-size 300",
    "convert import --hf nowhere --out new",
    "convert export --checkpoint nowhere --out new",
    "convert verify --checkpoint nowhere --hf nowhere",
    "convert inspect nowhere",
    "inspect nowhere",
    "inspect show nowhere",
    "inspect diff nowhere a-folder",
    "inspect verify a-folder",
    "plot nowhere",
    "plot a-folder",
    "compare nowhere a-folder",
)
"""Verbs with an input that is missing, or of another kind."""
WRONG_PLACE = {
    "generate nowhere --prompt x": 2,
    "init a-file": 2,
    "init a-file/below": 7,
    "stdlib-corpus --output a-file/below": 7,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates the working folder, which holds an empty folder and an empty file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "a-file").touch()
    return tmp_path


def assert_one_message_and_no_trace(here: Path, text: str) -> None:
    assert text.startswith("error: ")
    assert text.count("\n") == 1, text
    assert sorted(path.name for path in here.iterdir()) == ["a-file", "a-folder"]


@pytest.mark.parametrize("line", MISSING)
@pytest.mark.fault(
    "input", "a verb's input is missing, or of another kind", happens="one message; nothing is written", exit_code=3
)
def test_missing_input_is_one_message(here: Path, line: str, notice: Notice) -> None:
    with notice:
        code, text = call(*line.split())
    assert code == notice.exit_code
    assert_one_message_and_no_trace(here, text)


@pytest.mark.parametrize("line", WRONG_PLACE)
def test_a_place_that_cannot_be_is_one_message(here: Path, line: str) -> None:
    code, text = call(*line.split())
    assert code == WRONG_PLACE[line]
    assert_one_message_and_no_trace(here, text)


@pytest.mark.parametrize("line", ["tokenize", "generate runs/a", "convert import", "verify parity", "inspect", "init"])
def test_missing_arguments_show_the_usage(line: str) -> None:
    code, text = call(*line.split())
    assert (code, "Usage: " in text) == (2, True)


SHARED = ["--layouts", "--steps", "--max-ranks", "--output", "--inject", "--list-injections"]


def test_the_three_checks_take_the_same_options() -> None:
    takes = {verb: options(command("verify", verb)) for verb in ("parity", "resume", "hf")}
    own = {verb: [name for name in names if name not in SHARED] for verb, names in takes.items()}
    assert own == {"parity": ["arguments"], "resume": ["arguments", "--at"], "hf": ["arguments", "--hf"]}
    assert all(set(SHARED) <= names.keys() for names in takes.values())
    assert {verb: names["--steps"] for verb, names in takes.items()} == {"parity": 3, "resume": 6, "hf": 5}
    assert {names["--max-ranks"] for names in takes.values()} == {8}


@pytest.mark.parametrize(
    ("verb", "faults"),
    [
        ("parity", FAULTS),
        ("resume", RESUME_FAULTS),
        ("hf", FAULTS),
        ("preempt", PREEMPT_FAULTS),
        ("backend", BACKEND_FAULTS),
        ("machine", MACHINE_FAULTS),
    ],
)
def test_each_check_lists_its_own_faults(verb: str, faults: tuple[Fault, ...]) -> None:
    assert call("verify", verb, "--list-injections") == (0, "".join(f"{fault.name}\n" for fault in faults))


OLD_NAMES = {
    "tokenize_corpus.py": (
        ["tokenize"],
        "--tokenizer --output-prefix --glob --text-key --workers --append-eos --overwrite",
    ),
    "train_tokenizer.py": (
        ["train-tokenizer"],
        "--output --vocab-size --algorithm --glob --text-key --bos-id --eos-id --pad-id --overwrite",
    ),
    "stdlib_corpus.py": (["stdlib-corpus"], "--output"),
    "plot_losses.py": (["plot"], "--output"),
    "generate.py": (["generate"], "--prompt --max-new-tokens --temperature --top-p --seed"),
    "convert_checkpoint.py export": (
        ["convert", "export"],
        "--checkpoint --out --like --dtype --workers --check-logits --threshold",
    ),
    "inspect_checkpoint.py diff": (["inspect", "diff"], "--worst"),
}
"""Command of 0.1.0 -> the verb that it calls now, and the options that it had."""


@pytest.mark.parametrize("old", OLD_NAMES)
def test_a_command_of_0_1_0_takes_its_options(old: str) -> None:
    verb, had = OLD_NAMES[old]
    script, *rest = old.split()
    wide = program_environment() | {"COLUMNS": "200"}
    done = completed([sys.executable, ROOT / "tools" / script, *rest, "--help"], environment=wide)
    assert done.returncode == 0, done.stderr
    shown = set(re.findall(r"--[a-z][a-z-]+", done.stdout)) - {"--help", "--no-append-eos"}
    assert set(had.split()) <= shown == {name for name in options(command(*verb)) if name.startswith("--")}


def test_the_old_inspect_takes_a_path_alone(tmp_path: Path) -> None:
    done = completed([sys.executable, ROOT / "tools" / "inspect_checkpoint.py", tmp_path / "nowhere"])
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert done.stderr.startswith(f"error: {tmp_path / 'nowhere'}")


@pytest.mark.parametrize(
    ("device", "gpus", "max_ranks", "hidden"),
    [("auto", 1, 8, True), ("auto", 1, 1, False), ("cuda", 1, 8, False), ("auto", 2, 8, False), ("auto", 0, 8, False)],
)
def test_layouts_are_verified_on_cpus_where_there_is_one_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: Device,
    gpus: int,
    max_ranks: int,
    hidden: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = on_several_ranks(config(train__device=device), max_ranks)
    assert found.train.device == ("cpu" if hidden else device)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "0")
    assert ("train.device=cuda checks that rank" in capsys.readouterr().out) == hidden
