"""Ranks that really hang: the watchdog names the one that the others wait for, keeps its stacks and ends the job."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mtrain.base import fault_points
from mtrain.base.heartbeat import Phase
from mtrain.watch.watchdog import Settings
from tests.fault_table import Notice
from tests.training.test_trainer import command, finished, records, running_ranks, start, wait_for_step

__all__ = ["command", "start"]

TIMEOUT_S = 4
SHORT = (f"train.process_group_timeout_s={TIMEOUT_S}", "layout.tp=2", "watch.start_timeout_s=5")
HANGS = "the watchdog names rank, phase and step within `train.process_group_timeout_s` + 15 s, with the rank's stack"


def watchdogs(run: Path) -> list[psutil.Process]:
    """Returns the watchdog processes of a run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if line[1:3] == ["-m", "mtrain.watch.watchdog"] and Settings(**json.loads(line[3])).run_dir == str(run):
            found.append(process)
    return found


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("kind", "phase", "frame"),
    [
        pytest.param(
            kind,
            phase,
            frame,
            marks=[pytest.mark.fault("ranks", f"{fault} in {phase}", happens=HANGS, exit_code=5), *marks],
            id=f"{kind}-{phase}",
        )
        for kind, fault, phase, frame, marks in [
            ("stop", "SIGSTOP of one of several ranks", Phase.FORWARD_BACKWARD, "in fault_point", []),
            ("stop", "SIGSTOP of one of several ranks", Phase.SAVE, "in fault_point", [pytest.mark.nightly]),
            ("gil", "a rank that never lets go of the interpreter's lock", Phase.VALIDATION, "in match", []),
            # by day tests/watch/test_judge.py tells it from the others
            ("loop", "a rank that runs in circles", Phase.DATA, "in fault_point", [pytest.mark.nightly]),
        ]
    ],
)
@pytest.mark.waits
def test_a_rank_that_hangs_is_named_with_its_stack(
    command: Any,
    start: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    phase: Phase,
    frame: str,
    notice: Notice,
) -> None:
    monkeypatch.setenv(fault_points.VARIABLE, f"{kind} rank=1 step=3 phase={phase}")
    process = start(command(*SHORT, "valid.interval_steps=3", "checkpoint.interval_steps=3", ranks=2))
    wait_for_step(tmp_path / "run", 2 if phase in (Phase.DATA, Phase.FORWARD_BACKWARD) else 3)
    with notice:
        code, output, errors = finished(process)
    assert code == notice.exit_code, errors
    assert notice.seconds is not None
    assert notice.seconds < TIMEOUT_S + 15
    assert re.search(rf"error: rank 1 (is stopped|makes no progress), for \d+ s, in {phase} of step 3", errors)
    assert f"{frame}" in errors.partition("  at: ")[2].splitlines()[0], errors
    assert errors.count("error:") == 1
    assert "class: lost peer (exit code 5), rank 1 on" in errors
    reported = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (reported["rank"], reported["reported_by"], reported["exit_code"]) == (1, "watchdog", 5)
    stacks = sorted((tmp_path / "run" / "failures" / "start_00001").glob("stacks_rank_*.txt"))
    assert [path.name for path in stacks] == ["stacks_rank_00000.txt", "stacks_rank_00001.txt"]
    assert re.match(r"rank 0, process \d+, in \w+ of step 3, waiting in [\w-]+ \d+\n", stacks[0].read_text())
    # it ends the ranks, the launcher ends with them, and then it ends itself
    wait_until(lambda: not watchdogs(tmp_path / "run"))
    assert "Traceback" not in output + errors


@pytest.mark.fault(
    "ranks", "SIGSTOP of a rank, and SIGCONT within the timeout", happens="the run goes on", exit_code=None
)
@pytest.mark.waits
def test_a_rank_that_goes_on_in_time_is_left_alone(command: Any, start: Any, tmp_path: Path, notice: Notice) -> None:
    longer = (*SHORT[1:], "train.process_group_timeout_s=8", "train.num_steps=40")
    process = start(command(*longer, ranks=2))
    wait_for_step(tmp_path / "run", 2)
    rank = running_ranks(tmp_path / "run", 2)[1]
    with notice:
        rank.suspend()
        time.sleep(4)
        rank.resume()
        code, _, errors = finished(process)
    assert code == 0, errors
    assert len(records(tmp_path / "run")) == 40
    assert not (tmp_path / "run" / "failure.json").exists()


@pytest.mark.fault(
    "ranks",
    "kill -9 of the watchdog",
    happens="a warning; it is started again, training continues",
    exit_code=None,
)
def test_a_killed_watchdog_is_started_once_more(command: Any, start: Any, tmp_path: Path, notice: Notice) -> None:
    process = start(command(*SHORT, "train.num_steps=4000", ranks=2))
    run = tmp_path / "run"
    with notice:
        for _ in range(2):
            wait_until(lambda: watchdogs(run))
            (dog,) = watchdogs(run)
            dog.kill()
            wait_until(lambda dog=dog: not dog.is_running() or dog.status() == psutil.STATUS_ZOMBIE)  # type: ignore[misc]
    wait_for_step(run, records(run)[-1]["step"] + 5 if records(run) else 5)
    process.send_signal(signal.SIGTERM)
    code, _, errors = finished(process)
    assert code == 0, errors
    assert "warning: the watchdog has ended; restarting it once" in errors
    assert "warning: the watchdog has ended again; this run continues without one" in errors
