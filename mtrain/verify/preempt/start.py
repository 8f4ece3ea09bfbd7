"""One start of the drill: real ranks under `mtrain launch local`, a real signal in a phase, planted faults."""

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

from mtrain.base.errors import UnfinishedError
from mtrain.base.fault_points import REACHED, VARIABLE, InjectedFault
from mtrain.base.heartbeat import Phase
from mtrain.runs.folder import RunFolder

SIGNAL = signal.SIGUSR1
_POLL_S = 0.02
_LOG_LINES = 15


@dataclass(frozen=True)
class Stop:
    """Phase and step of the ranks at the signal."""

    phase: Phase | None
    """None: while programs load."""
    step: int
    """Step number; 0 before the first."""

    @property
    def name(self) -> str:
        """Returns the stop in words."""
        if self.phase is None:
            return "while programs load"
        return f"in {self.phase}" + (f" of step {self.step}" if self.step else "")


class Process(Protocol):
    """Running launcher; `subprocess.Popen` is one."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


Program = Callable[[Sequence[str], Path, Mapping[str, str]], Process]
"""Starts a command, appends its output to a file, and adds variables to the environment."""


def new_process(command: Sequence[str], log: Path, more: Mapping[str, str]) -> Process:
    """Starts a separate process, as a user would."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command, env={**os.environ, **more}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


class StopFailedError(UnfinishedError):
    """A stopped run did not stop as it must; a note holds the end of its log."""


def run_to_end(program: Program, command: Sequence[str], log: Path) -> None:
    """Starts the run and waits for its end; `log` gets all output.

    Raises:
        StopFailedError: The run did not end with 0.
    """
    with _started(program(command, log, {})) as process:
        code = process.wait()
    _require(code == 0, f"the run ended with exit code {code}", log)


def run_until_stopped(
    program: Program, command: Sequence[str], run_dir: Path, stop: Stop, last_rank: int, log: Path
) -> float:
    """Starts the run and asks it to stop; returns the seconds from the signal to the end of the launcher.

    Only `last_rank` must have reached the phase at the signal.

    Raises:
        StopFailedError: The run did not reach the phase, did not end with 0, or left no marker.
    """
    reached = run_dir.parent / "reached"
    reached.unlink(missing_ok=True)
    environment = {}
    if stop.phase is not None:
        fault = InjectedFault("await_stop", rank=last_rank, step=stop.step, phase=stop.phase)
        environment = {VARIABLE: str(fault), REACHED: str(reached)}
    with _started(program(command, log, environment)) as process:
        # a launcher that has started ranks has installed its signal handlers
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
    """Yields the launcher; kills it, and so its ranks, if it is still running at the end."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def launcher(config: Path, num_ranks: int) -> list[str]:
    """Returns the command that starts a configuration here."""
    return [sys.executable, "-m", "mtrain", "launch", "local", "--num-ranks", str(num_ranks), str(config)]


def _require(is_so: bool, text: str, log: Path) -> None:
    if not is_so:
        tail = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        said = next((line for line in reversed(tail) if line.strip()), None)
        failed = StopFailedError(text if said is None else f"{text}; its log ends with: {said}")
        failed.add_note("\n".join(tail))
        raise failed
