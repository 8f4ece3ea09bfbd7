"""What README.md shows of the program is what the program prints."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command_line import call, parsed
from tests.paths import DOCS, ROOT
from tests.serve.service import address_of
from tests.warm import Command, program_environment

TEXT = (ROOT / "README.md").read_text()
LONG = ("verify parity", "launch/quickstart.sh")
"""Commands that take minutes: their output is compared at night, numbers that depend on the processor left out."""


def shown() -> dict[str, list[str]]:
    """Returns the lines below each command of the blocks of a console."""
    blocks = re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
    parts = [part.splitlines() for block in blocks for part in block.split("$ ")[1:]]
    return {command: [line.rstrip() for line in lines] for command, *lines in parts}


SHOWN = shown()


PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def without_numbers(line: str) -> str:
    """Leaves numbers out, the tensor that deviates most, and the spaces that align them."""
    line = re.sub(r"(?:gradient|update) of \S+, step \d+|decoder\.\S+", "TENSOR", line)
    return " ".join(re.sub(r"\d[\d.,:e+-]*", "N", line).split())


def without_answers(lines: list[str]) -> list[str]:
    """Leaves out what follows each question, on another Python than the page's: its docstrings are the corpus."""
    if sys.version_info[:2] == (3, 11):
        return lines
    return [line for before, line in zip(["", *lines], lines) if not before.startswith("> ")]


def is_within(lines: list[str], output: list[str]) -> bool:
    """Says whether lines stand in an output in this order; `...` and empty lines stand for any."""
    rest = iter(output)
    return all(line in rest for line in lines if line not in ("", "..."))


def test_it_has_at_most_120_lines() -> None:
    assert len(TEXT.splitlines()) <= 120


def test_every_command_is_one() -> None:
    assert len(SHOWN) == 6
    for command in SHOWN:
        program, *words = shlex.split(command)
        if program == "mtrain":
            parsed(shlex.join(words))
        else:
            assert Path(ROOT, words[0]).exists()
    assert all(any(long in command for command in SHOWN) for long in LONG)


@pytest.mark.parametrize("command", [each for each in SHOWN if re.match("mtrain (plan|check)", each)])
def test_plans_are_printed_as_shown(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, output = call(*shlex.split(command)[1:])
    assert code == 0
    assert SHOWN[command]
    assert is_within(SHOWN[command], [line.rstrip() for line in output.splitlines()])


@pytest.mark.nightly  # minutes; the verbs themselves are tested by day
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", [each for each in SHOWN if any(long in each for long in LONG)])
def test_long_commands_print_what_is_shown(command: str, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    assert call("init", folder)[0] == 0
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**program_environment(), "PATH": programs, "PYTHON": sys.executable}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [without_numbers(line) for line in (done.stdout + done.stderr).splitlines()]
    expected = without_answers([without_numbers(line) for line in SHOWN[command]])
    assert is_within(expected, found), done.stdout


def test_figures_are_those_of_the_measurement() -> None:
    page = (DOCS / "proof" / "same-loss-on-any-layout.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| ([\d.]+ %) \| ([\d.]+ %) \|$", TEXT, re.MULTILINE)
    assert rows == re.findall(r"^\| [^|]+ \| ([\d.]+ %) \| ([\d.]+ %) \| [\d., ]+\|$", page, re.MULTILINE)
    assert len(rows) == 3
    worst = re.search(r"^\| \*\*worst of all\*\* \|(.*)\|$", (DOCS / "proof" / "parity.md").read_text(), re.MULTILINE)
    assert worst is not None
    runs, loss, _, gradient, _ = re.findall(r"\*\*([\d.e-]+)\*\*", worst[1])
    text = " ".join(TEXT.split())
    assert f"[{runs} runs on layouts" in text
    assert f"at most {loss} in the loss and {gradient} in a gradient" in text
    faults = re.search(r"^(\d+) faults\.", (DOCS / "proof" / "faults.md").read_text(), re.MULTILINE)
    assert faults is not None
    assert "[more than 200 injected faults]" in text
    assert int(faults[1]) > 200


def test_models_of_the_table_are_those_that_were_proved() -> None:
    """A mark stands for columns of docs/reference/models.md that have no gap in documents and LoRA."""
    lines = [line.strip("| ").split(" | ") for line in (DOCS / "reference" / "models.md").read_text().splitlines()]
    columns, *rows = [line for line in lines if line[0].startswith("`")]
    assert len(rows) > 20
    for name in ("convert", "documents", "LoRA"):
        assert {row[columns.index(name)] for row in rows} == {"✓"}, name


def test_a_loss_of_five_lines_runs() -> None:
    (code,) = [each for each in PROGRAMS if "focal_loss" in each]
    names: dict[str, object] = {}
    exec(code, names)
    assert callable(names["focal_loss"])
    assert len([line for line in code.splitlines() if line]) == 5
    assert json.dumps(sorted(name for name in names if "loss" in name)) == '["focal_loss"]'


@pytest.mark.waits  # for the SDK, which asks for results now and then
def test_a_service_answers_the_sdk_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [each for each in PROGRAMS if "from tinker import" in each]
    assert len([line for line in code.splitlines() if line]) == 10
    ((program, *words),) = [shlex.split(each) for each in re.findall(r"`(mtrain serve configs.*?)`", TEXT)]
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    service = Command([sys.executable, "-m", program, *words, "--port", "0"], tmp_path, program_environment())
    printed: list[str] = []
    try:
        address = address_of(tmp_path / "runs" / "tiny" / "service.json")
        exec(code.replace("http://127.0.0.1:8000", address), {"print": lambda value: printed.append(str(value))})
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait(600)
    assert service.returncode == 0, service.errors()
    losses, answer = re.findall(r"  # (.+)$", code, re.MULTILINE)
    assert printed == [*losses.split(), answer]
