"""Jobs suspended for longer than ranks may wait for each other, as by `scontrol suspend`, go on."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mtrain.base.heartbeat import read_beat
from tests.fault_table import Notice
from tests.training.test_trainer import command, finished, numbers, running_ranks, start, wait_for_step
from tests.watch.test_hanging_ranks import wait_until

__all__ = ["command", "start"]

TIMEOUT_S, SUSPENDED_S = 3, 5
SETTINGS = (f"train.process_group_timeout_s={TIMEOUT_S}", "watch.start_timeout_s=5", "train.num_steps=60")


def is_waiting(run: Path, rank: int) -> bool:
    """Says whether its heartbeat reports a wait for another rank."""
    beat = read_beat(run / "heartbeats", rank)
    return beat is not None and beat.call is not None


@pytest.mark.fault(
    "ranks",
    "a job suspended for longer than `train.process_group_timeout_s`, and resumed (SIGSTOP and SIGCONT of the "
    "launcher, the ranks and the watchdog)",
    happens="it goes on bit for bit, whichever process stops and wakes up first",
    exit_code=None,
)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("layout.tp=2", id="collectives", marks=pytest.mark.nightly),
        pytest.param("layout.pp=2", id="messages and collectives"),
    ],
)
@pytest.mark.waits
def test_a_suspended_job_goes_on(command: Any, start: Any, tmp_path: Path, layout: str, notice: Notice) -> None:
    process = start(command(*SETTINGS, layout, ranks=2))
    run = tmp_path / "run"
    wait_for_step(run, 2)
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(tree) >= 4, "launcher, ranks and watchdog"
    with notice:
        for first in (1, 0):
            # the other rank waits for it, so that the suspension falls into a wait
            running_ranks(run, 2)[first].suspend()
            wait_until(lambda first=first: is_waiting(run, 1 - first))  # type: ignore[misc]
            for one in tree:
                one.suspend()
            time.sleep(SUSPENDED_S)
            for one in tree if first else reversed(tree):
                one.resume()
            goal = numbers(run)[-1][0] + 3
            wait_until(lambda goal=goal: process.poll() is not None or numbers(run)[-1][0] >= goal)  # type: ignore[misc]
            assert process.poll() is None, finished(process)
        code, _, errors = finished(process)
    assert code == 0, errors
    assert "error" not in errors
    assert len(numbers(run)) == 60
    whole = start(command("train.num_steps=60", layout, ranks=2, run="whole"))
    assert finished(whole)[0] == 0
    assert numbers(run) == numbers(tmp_path / "whole")


@pytest.mark.fault(
    "ranks",
    "SIGSTOP of one rank after a suspension of the whole job that was longer than the timeout",
    happens="named within `train.process_group_timeout_s` + 15 s, as if there had been no suspension",
    exit_code=5,
)
@pytest.mark.parametrize("watchdog", [pytest.param(True, marks=pytest.mark.nightly), False])
@pytest.mark.waits
def test_a_lost_rank_is_named_after_a_suspension(
    command: Any, start: Any, tmp_path: Path, watchdog: bool, notice: Notice
) -> None:
    off = () if watchdog else ("watch.enabled=false",)
    process = start(command(*SETTINGS, *off, "layout.tp=2", "train.num_steps=100000", ranks=2))
    run = tmp_path / "run"
    wait_for_step(run, 2)
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for one in tree:
            one.send_signal(number)
        time.sleep(SUSPENDED_S if number == signal.SIGSTOP else 0)
    wait_for_step(run, numbers(run)[-1][0] + 3)
    with notice:
        running_ranks(run, 2)[1].suspend()
        code, _, errors = finished(process)
    assert code == notice.exit_code, errors
    assert notice.seconds is not None
    assert notice.seconds < TIMEOUT_S + 15
    said = "rank 1 is stopped" if watchdog else "rank 0 lost the connection to another rank; rank 1: silent for"
    assert said in errors
    assert errors.count("error:") == 1
