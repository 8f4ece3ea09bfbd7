"""Stop signals at any time of a run: while programs load and before the first step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mtrain.base import fault_points
from mtrain.launch.local import free_port
from mtrain.runs.folder import RunFolder
from mtrain.training.recording import Life
from tests.config.samples import config
from tests.fault_table import Notice
from tests.paths import ROOT
from tests.training.test_trainer import DEADLINE_S, command, finished, records, start, start_cold, wait_for_file

__all__ = ["command", "start", "start_cold"]
pytestmark = pytest.mark.usefixtures("hangup")


def has_handler(pid: int, number: signal.Signals) -> bool:
    """Says whether the process handles the signal by now."""
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def ranks_of(launcher: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """Returns the ranks that are up."""
    ranks = {}
    for child in psutil.Process(launcher.pid).children():
        if "RANK" in (environment := child.environ()):
            ranks[int(environment["RANK"])] = child
    return ranks


def loads_torch(pid: int) -> bool:
    """Says whether the process has begun to load torch, which takes seconds."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


LAUNCHER_LOADS = "while the launcher loads"
RANK_LOADS = "while a rank loads torch"
DATA_OPENS = "while a rank builds model and data"


@pytest.mark.parametrize(
    ("number", "at", "ranks"),
    [
        pytest.param(
            number,
            at,
            ranks,
            marks=[
                pytest.mark.fault(
                    "signals", f"{number.name} {at}", happens="every rank leaves with the marker REQUEUE", exit_code=0
                ),
                *marks,
            ],
            id=f"{number.name}-{at}-{ranks}",
        )
        for number, at, ranks, marks in [
            (signal.SIGTERM, LAUNCHER_LOADS, 1, []),
            (signal.SIGHUP, RANK_LOADS, 1, []),
            (signal.SIGHUP, RANK_LOADS, 2, [pytest.mark.nightly]),  # that ranks agree is shown by the next row
            (signal.SIGUSR1, DATA_OPENS, 2, []),
        ]
    ],
)
def test_a_signal_before_the_first_step_leaves_the_marker_alone(
    command: Any,
    start: Any,
    start_cold: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    at: str,
    ranks: int,
    notice: Notice,
) -> None:
    """The signal goes to the launcher, or to the last rank only."""
    if at == DATA_OPENS:
        monkeypatch.setenv(fault_points.VARIABLE, "usr1 rank=1 step=0 phase=build")
    arguments = command(f"layout.cp={ranks}", ranks=2)
    arguments[arguments.index("-n") + 1] = str(ranks)
    process = (start if at == DATA_OPENS else start_cold)(arguments)
    with notice:
        if at == LAUNCHER_LOADS:
            wait_until(lambda: has_handler(process.pid, number))
            process.send_signal(number)  # on a slow machine a rank may have begun; the result is the same
        if at == RANK_LOADS:
            last = ranks - 1
            wait_until(lambda: last in ranks_of(process) and loads_torch(ranks_of(process)[last].pid))
            ranks_of(process)[last].send_signal(number)
        code, _, errors = finished(process)
    assert code == notice.exit_code, errors
    assert "stopped by a signal before" in (tmp_path / "run" / "REQUEUE").read_text()
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert records(tmp_path / "run") == []
    assert errors == ""


@pytest.mark.fault(
    "signals",
    "SIGUSR1 while torchrun loads",
    happens="every rank leaves with the marker REQUEUE; torchrun itself with 75, which is to start again",
    exit_code=75,
)
def test_a_signal_to_torchrun_while_it_loads_reaches_the_ranks(
    command: Any, start_cold: Any, tmp_path: Path, notice: Notice
) -> None:
    config = command()[4:]
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"  # the script takes the first python
    environment = ["env", path, "NPROC_PER_NODE=1", f"MASTER_PORT={free_port()}"]
    process = start_cold([*environment, "bash", str(ROOT / "launch" / "torchrun.sh"), *config])
    wait_until(lambda: loads_torch(process.pid))
    with notice:
        process.send_signal(signal.SIGUSR1)
        code, _, errors = finished(process)
    assert code == notice.exit_code, errors
    assert "stopped by a signal before" in (tmp_path / "run" / "REQUEUE").read_text()
    assert "torchrun was stopped by SIGUSR1" in errors
    assert "Traceback" not in errors


@pytest.mark.fault(
    "signals",
    "Ctrl-C in a step",
    happens="it is saved: `stopped at step 11 of 13; the same command resumes`, and it does",
    exit_code=0,
)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])  # the first of two says the same
def test_an_interrupt_says_where_the_run_stands(
    command: Any, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, notice: Notice
) -> None:
    arguments = command("train.num_steps=13", f"layout.tp={ranks}", ranks=ranks)
    monkeypatch.setenv(fault_points.VARIABLE, "await_stop rank=0 step=11 phase=data")
    monkeypatch.setenv(fault_points.REACHED, str(tmp_path / "reached"))
    process = start(arguments)
    wait_for_file(tmp_path / "reached")
    with notice:
        process.send_signal(signal.SIGINT)
        code, output, errors = finished(process)
    monkeypatch.delenv(fault_points.VARIABLE)
    logs = [path.read_text() for path in (tmp_path / "run" / "logs").glob("*.log")]
    assert (code, errors, len(logs)) == (notice.exit_code, "", ranks - 1)
    said = [line for text in (output, *logs) for line in text.splitlines() if "stopped" in line]
    assert said == ["stopped at step 11 of 13; the same command resumes"]
    code, output, errors = finished(start(arguments))
    assert (code, errors) == (0, "")
    assert [record["step"] for record in records(tmp_path / "run")] == [*range(1, 14)]


@pytest.mark.parametrize(
    ("resume", "saved", "line"),
    [
        ("auto", [4, 9], "stopped at step 9 of 10; the same command resumes"),
        ("auto", [4], "stopped at step 9 of 10; the same command resumes from step 4"),
        ("auto", [], "stopped at step 9 of 10; the same command resumes from step 0"),
        ("auto", [10], "stopped at step 10 of 10; the same command resumes"),
        ("never", [9], "stopped at step 9 of 10; checkpoint.resume=auto resumes"),
    ],
)
def test_what_was_saved_decides_where_a_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], resume: str, saved: list[int], line: str
) -> None:
    (tmp_path / "events.jsonl").touch()
    for step in saved:
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    life = Life(RunFolder(tmp_path), rank=0)
    facts = {"mtrain": "1", "device": "cpu", "layout": "tp1", "world_size": "1"}
    life.started(config(checkpoint={"resume": resume}, train__num_steps=10), facts, lambda: None)
    life.stepped(9)
    life.stopped("stopped by a signal after step 9")
    assert capsys.readouterr() == (line + "\n", "")


def test_a_wrong_configuration_is_reported_although_a_signal_came(command: Any, start_cold: Any) -> None:
    process = start_cold(command("layout.tp=3"))
    wait_until(lambda: has_handler(process.pid, signal.SIGTERM))
    process.send_signal(signal.SIGTERM)
    code, _, errors = finished(process)
    assert code == 2
    assert errors.startswith("error:")


@pytest.mark.fault("signals", "Ctrl-C twice while programs load", happens="the program ends at once", exit_code=130)
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_interrupts_end_a_start_at_once(command: Any, start_cold: Any, ranks: int, notice: Notice) -> None:
    process = start_cold(command(ranks=ranks))
    wait_until(lambda: has_handler(process.pid, signal.SIGUSR1))
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None, "one is not enough"
    with notice:
        process.send_signal(signal.SIGINT)
        code, output, errors = finished(process)
    assert code == notice.exit_code
    verb = "train" if ranks == 1 else "launch"
    assert (output, errors) == ("", f"interrupted: mtrain {verb} has not finished\n")
