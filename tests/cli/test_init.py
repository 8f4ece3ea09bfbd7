"""`mtrain init`: a folder that one can train from, made once; and the scripts in it, which need no checkout."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.base.version import SHARED
from mtrain.cli.init import PARTS
from tests.cli.command_line import call, parsed
from tests.fault_table import Notice
from tests.paths import ROOT

NEEDS_A_CHECKOUT = {"setup.sh", "browser.sh"}
"""Scripts that install the repository and the requirements of its tests."""
STAND_IN = """#!/bin/bash
[[ $1 == -c ]] || { printf '%q ' "$@"; echo; } >> calls
"""
"""Interpreter that has mtrain, and records what it is asked to run."""


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_copies_all_that_a_checkout_has(tmp_path: Path) -> None:
    code, text = call("init", tmp_path / "new" / "project")
    assert code == 0, text
    made = files(tmp_path / "new" / "project")
    theirs = {f"configs/{name}": content for name, content in files(ROOT / "configs").items()}
    scripts = {f"launch/{name}": content for name, content in files(ROOT / "launch").items()}
    examples = {f"examples/{name}": content for name, content in files(ROOT / "examples").items()}
    theirs |= {name: content for name, content in examples.items() if "__pycache__" not in name}
    assert made == theirs | {name: scripts[name] for name in scripts if Path(name).name not in NEEDS_A_CHECKOUT}
    assert not any(path.is_symlink() for path in (tmp_path / "new").rglob("*"))


def test_the_checkout_holds_each_file_once() -> None:
    for part in ("configs", "examples"):
        assert (SHARED / part).resolve() == ROOT / part
    scripts = {name: (SHARED / "launch" / name).resolve() for name in os.listdir(SHARED / "launch")}
    assert scripts == {name: ROOT / "launch" / name for name in scripts}


def test_what_it_says_to_do_next_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = call("init", tmp_path)
    monkeypatch.chdir(tmp_path)
    (line,) = re.findall(r"^  mtrain (check .*)$", text, re.MULTILINE)
    code, plan = call(*line.split())
    assert (code, "2 ranks" in plan) == (0, True)
    for script in re.findall(r"(?:launch|examples)/[a-z_/.]+\.(?:sh|sbatch)", text):
        assert (tmp_path / script).exists(), script


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.fault("input", "mtrain init where there is something", happens="refused; nothing is touched", exit_code=2)
def test_nothing_is_overwritten(tmp_path: Path, part: str, notice: Notice) -> None:
    (tmp_path / part).mkdir()
    (tmp_path / part / "mine").write_text("own")
    with notice:
        code, text = call("init", tmp_path)
    assert (code, text.count("\n")) == (notice.exit_code, 1)
    assert text.startswith(f"error: {tmp_path / part} already exists")
    assert files(tmp_path) == {f"{part}/mine": b"own"}


def quickstart(folder: Path, python: Path | str) -> subprocess.CompletedProcess[str]:
    """Runs the copied script with another interpreter."""
    call("init", folder)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python)}
    line = ["bash", "launch/quickstart.sh"]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def test_the_quickstart_runs_without_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    done = quickstart(tmp_path / "project", stand_in)
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.chdir(tmp_path / "project")
    lines = [line.removeprefix("-W ignore -m mtrain ") for line in Path("calls").read_text().splitlines()]
    verbs = ["stdlib-corpus", "train-tokenizer", "tokenize", "tokenize", "launch", "convert", "launch", "convert"]
    assert [line.split()[0] for line in lines] == [*verbs, "generate", "plot"]
    for line in lines:
        given = parsed(line)
        for name in given.get("arguments", []):
            assert Path(name).exists(), name


def test_the_quickstart_says_where_mtrain_is_missing(tmp_path: Path) -> None:
    without = tmp_path / "python"
    without.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    without.chmod(0o755)
    done = quickstart(tmp_path / "project", without)
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr == (
        f"error: {without} has no mtrain; activate the environment that has it, or name its interpreter in PYTHON\n"
    )
