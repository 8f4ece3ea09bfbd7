"""One start of the drill: real ranks under `mtrain launch local`, and a real signal when they have come far enough."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from mtrain.base.errors import NumericError
from mtrain.base.fault_points import REACHED, VARIABLE, InjectedFault
from mtrain.base.heartbeat import Phase
from mtrain.runs.folder import RunFolder

SIGNAL = signal.SIGUSR1
_POLL_S = 0.02
_LOG_LINES = 15


@dataclass(frozen=True)
class Stop:
    """Where the ranks are when the signal comes."""

    phase: Phase | None
    """None: while programs load."""
    step: int
    """0 before the first one."""

    @property
    def name(self) -> str:
        """In words."""
        if self.phase is None:
            return "while programs load"
        return f"in {self.phase}" + (f" of step {self.step}" if self.step else "")


class Process(Protocol):
    """A running launcher; `subprocess.Popen` is one."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


Program = Callable[[Sequence[str], Path, Mapping[str, str]], Process]
"""Starts a command that appends its output to a file, with these variables beside those of the environment."""


def new_process(command: Sequence[str], log: Path, more: Mapping[str, str]) -> Process:
    """An interpreter of its own, as a user would start it."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command, env={**os.environ, **more}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


class StopFailedError(NumericError):
    """A run that was asked to stop did something else."""


def run_to_end(program: Program, command: Sequence[str], log: Path) -> None:
    """A start that nothing stops.

    Args:
        program: Starts it.
        command: Of the launcher.
        log: Gets all output.

    Raises:
        StopFailedError: It did not end with 0.
    """
    with _started(program(command, log, {})) as process:
        code = process.wait()
    _require(code == 0, f"the run ended with exit code {code}", log)


def run_until_stopped(
    program: Program, command: Sequence[str], run_dir: Path, stop: Stop, last_rank: int, log: Path
) -> float:
    """A start that is asked to stop, and has to leave everything that the next one needs.

    Args:
        program: Starts it.
        command: Of the launcher.
        run_dir: Where the run is.
        stop: When the signal is sent.
        last_rank: The rank that has to be there; the others are where they are.
        log: Gets all output.

    Returns:
        Seconds from the signal to the end of the launcher.

    Raises:
        StopFailedError: The run did not get there, did not end with 0, or left no marker.
    """
    reached = run_dir.parent / "reached"
    reached.unlink(missing_ok=True)
    environment = {}
    if stop.phase is not None:
        fault = InjectedFault("await_stop", rank=last_rank, step=stop.step, phase=stop.phase)
        environment = {VARIABLE: str(fault), REACHED: str(reached)}
    with _started(program(command, log, environment)) as process:
        # a launcher with ranks has its handlers
        while not (reached.exists() if stop.phase is not None else psutil.Process(process.pid).children()):
            _require(process.poll() is None, f"the run ended with {process.poll()} before it got there", log)
            time.sleep(_POLL_S)
        process.send_signal(SIGNAL)
        sent = time.monotonic()
        code = process.wait()
        seconds = time.monotonic() - sent
    _require(code == 0, f"a run that was asked to stop ended with exit code {code} instead of 0", log)
    _require(RunFolder(run_dir).requeue_marker.exists(), "a run that was asked to stop left no marker REQUEUE", log)
    return seconds


@contextlib.contextmanager
def _started(process: Process) -> Iterator[Process]:
    """The launcher; it takes its ranks with it, however this ends."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def launcher(config: Path, num_ranks: int) -> list[str]:
    """The command that starts a configuration here."""
    return [sys.executable, "-m", "mtrain", "launch", "local", "--num-ranks", str(num_ranks), str(config)]


def _require(is_so: bool, text: str, log: Path) -> None:
    if not is_so:
        tail = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        raise StopFailedError("\n".join([text, *tail]))
