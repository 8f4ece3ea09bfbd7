"""Output on a real terminal of 80 columns: what has to be read there can be, in colours unless they are unwanted."""

from __future__ import annotations

import os
import pty
import re
import sys
import threading
from collections.abc import Mapping
from fcntl import ioctl
from pathlib import Path
from struct import pack
from termios import TIOCSWINSZ

import pytest

from mtrain.runs.events import EventKind
from tests.pool import Pool
from tests.report.monitor.folders import beats, started
from tests.training.test_trainer import BASE
from tests.warm import Command, completed, program_environment

COLUMNS = 80
COLOUR, CONTROL = r"\x1b\[[\d;]*m", r"\x1b\[[\d;?]*[A-Za-z]"


def on_terminal(folder: Path, *arguments: object, environment: Mapping[str, str] | None = None) -> str:
    """Returns what the program writes to a terminal of COLUMNS x 24, control sequences and all."""
    ours, theirs = pty.openpty()
    ioctl(ours, TIOCSWINSZ, pack("HHHH", 24, COLUMNS, 0, 0))
    clean = {name: value for name, value in program_environment(folder).items() if name not in ("COLUMNS", "NO_COLOR")}
    pieces: list[bytes] = []

    def read() -> None:  # at once: a terminal that nobody reads would hold the program
        while piece := os.read(ours, 4096):
            pieces.append(piece)
            if END in piece:
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    device = Path(os.ttyname(theirs))
    command = [sys.executable, "-m", "mtrain", *map(str, arguments)]
    process = Command(command, folder, {**clean, "TERM": "xterm-256color", **(environment or {})}, device)
    assert process.wait(600) == 0, b"".join(pieces)
    os.write(theirs, END)
    reader.join()
    os.close(ours)
    os.close(theirs)
    return b"".join(pieces).removesuffix(END).decode()


END = b"\x00"


def lines(text: str) -> list[str]:
    """Returns the lines that were on the screen, also those that others replaced."""
    return [line for line in re.split(r"[\r\n]+", re.sub(CONTROL, "\r", re.sub(COLOUR, "", text))) if line.strip()]


def test_a_run_shows_step_loss_and_remaining_time(pool: Pool, tmp_path: Path) -> None:
    (config := tmp_path / "base.yaml").write_text(BASE)
    text = on_terminal(tmp_path, "train", config, f"run.dir={tmp_path / 'run'}", "train.num_steps=12")
    steps = [line for line in lines(text) if " loss " in line]
    assert steps
    for line in steps:
        assert len(line) <= COLUMNS, line
        assert re.fullmatch(r"train \S*\s* *\d+/12 loss \d\.\d{4}  .*eta (-|\d+):..:..\s*", line), line
    assert "12/12" in steps[-1]
    assert re.search(COLOUR, text)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Makes three runs with long names; one has failed, one has an alarm."""
    for name in ("a", "b", "c"):
        log = started(tmp_path / name, name=f"qwen3-8b-lora-{name}")
        beats(tmp_path / name, 0, memory_bytes=3 * 2**30)
    log.write(EventKind.ALARM, 4, "rank 1 is slow: its own work took 2.1 times the median")
    return tmp_path


def test_status_keeps_run_state_step_and_alarms(pool: Pool, runs: Path) -> None:
    text = on_terminal(runs, "status", *(runs / name for name in "abc"))
    shown = lines(text)
    assert max(map(len, shown)) <= COLUMNS
    heading = re.findall(r"[\w/]+", shown[1])
    assert {"run", "state", "step", "alarms"} <= {*heading}
    assert "checkpoint" not in heading
    for name in "abc":
        assert re.search(rf"│qwen3-8b-lora-{name} +│ \w+.* │ 4/10 │", "\n".join(shown)), text
    words = " ".join(cells[-1].strip() for line in shown if len(cells := line.strip("│").split("│")) > 3)
    assert "step 4: rank 1 is slow: its own work took 2.1 times the median" in words
    assert re.search(COLOUR, text)


def test_colours_are_for_terminals_that_want_them(pool: Pool, runs: Path) -> None:
    verb = ["status", runs / "a"]
    assert "\x1b[32m" in on_terminal(runs, *verb), "running, in green"
    assert not re.search(r"\x1b\[[\d;]*3\dm", on_terminal(runs, *verb, environment={"NO_COLOR": "1"}))
    piped = completed([sys.executable, "-m", "mtrain", *verb], runs)
    assert "running" in piped.stdout
    assert "\x1b" not in piped.stdout
