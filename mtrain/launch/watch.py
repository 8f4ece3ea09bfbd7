"""Watches the ranks of a launch: which one fails or is stopped, and whether any still gives a sign of life."""

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mtrain.base.awake import AwakeClock
from mtrain.base.errors import RankLostError
from mtrain.base.heartbeat import Beat, read_beat
from mtrain.base.signals import StopSignal

_POLL_S = 0.02
_LOOK_S = 0.5
"""Seconds between two looks at process states and files, which cost more than a poll."""
_LONGEST_GAP_S = 4 * _LOOK_S
"""Longest time in seconds between two readings of a clock; in a longer gap the launcher stood still."""


@dataclass(frozen=True)
class Rank:
    number: int
    process: subprocess.Popen[bytes]
    log: Path | None
    """File of the rank's output; None if it shares ours."""
    log_start_bytes: int

    @property
    def is_running(self) -> bool:
        """Whether the rank is running; updates `process.returncode`."""
        return self.process.poll() is None


@dataclass(frozen=True)
class Failure:
    """Why a launch ends."""

    rank: Rank
    cause: str
    """Predicate of the sentence that begins with "rank 3"."""
    exit_code: int
    is_of_its_own: bool
    """Whether the rank exited with a code of its own, and may have said why."""
    seen_s: float = field(default_factory=time.time)


class Heartbeats:
    """Signs of life of one launch's ranks: heartbeats, or processor time if the disk is full."""

    def __init__(self, folder: Path, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A rank counts as lost after `limit_s` seconds of silence; `clock` returns seconds."""
        self._folder, self.limit_s, self._clock = folder, limit_s, AwakeClock(_LONGEST_GAP_S, clock)
        self._latest: dict[int, tuple[tuple[Beat | None, float], float]] = {}
        """Rank -> its latest sign of life, and the time at which it was seen."""

    def of(self, rank: Rank) -> Beat | None:
        """Returns the rank's latest beat in this launch; None before the first."""
        beat = read_beat(self._folder, rank.number)
        return beat if beat is not None and beat.pid == rank.process.pid else None

    def is_lost(self, rank: Rank) -> bool:
        """Returns whether a running rank has been silent for too long; call it often."""
        now, sign = self._clock(), (self.of(rank), _processor_seconds(rank))
        latest = self._latest.get(rank.number)
        if latest is None or latest[0] != sign:
            self._latest[rank.number] = sign, now
            return False
        return now - latest[1] > self.limit_s


class RankWatch:
    def __init__(
        self, ranks: Sequence[Rank], stop: StopSignal, grace_s: float, heartbeats: Heartbeats | None = None
    ) -> None:
        """`grace_s` is how long ranks have to end after one has failed, and suspended ranks to answer a signal."""
        self._ranks, self._stop, self._grace_s, self._heartbeats = ranks, stop, grace_s, heartbeats
        self._num_passed_on = 0
        self._stopped_since_s: dict[int, float] = {}
        self._clock = AwakeClock(_LONGEST_GAP_S)
        self._looked_s = self._clock()

    def wait(self) -> Failure | None:
        """Waits until all ranks have ended, or the grace period after a failure is over; returns the first failure."""
        failure: Failure | None = None
        deadline = float("inf")
        while True:
            # an exception inside poll() would leave the lock of a process held, and wait() would never return
            with self._stop.interrupt_held():
                running = [rank for rank in self._ranks if rank.is_running]
                if not running or self._clock() >= deadline:
                    return failure if failure is not None else self._first_failed()
                for number in list(self._stop.sent)[self._num_passed_on :]:
                    self._num_passed_on += 1
                    for rank in self._ranks:
                        rank.process.send_signal(number)
                if failure is None:
                    # first, since a rank that has just failed names the silent one that it waited for
                    if (failure := self._first_failed()) is not None:
                        deadline = self._clock() + self._grace_s
                    elif (lost := self._lost()) is not None:
                        return lost
            time.sleep(_POLL_S)

    def _first_failed(self) -> Failure | None:
        """Returns the first cause among ranks that failed at once: a killed rank, then an exit code other than 1 or 5.

        A rank whose peer is gone fails with 1 or 5, or by SIGABRT under NCCL; these must not hide the cause.
        """
        failed = [rank for rank in self._ranks if rank.process.returncode not in (None, 0)]
        first = min(failed, key=_precedence, default=None)
        if first is None:
            return None
        code = first.process.returncode
        if code > 0:
            return Failure(first, f"failed with exit code {code}", code, True)
        cause = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGABRT:
            cause += ", as NCCL ends a rank that has lost another one or waits for it too long"
        return Failure(first, cause, RankLostError.exit_code, False)

    def _lost(self) -> Failure | None:
        """Returns the failure of a rank that will not end by itself; looks only every `_LOOK_S` seconds."""
        now = self._clock()
        if now - self._looked_s < _LOOK_S:
            return None
        self._looked_s = now
        running = [rank for rank in self._ranks if rank.is_running]
        for rank in running if self._num_passed_on else []:
            if not _is_stopped(rank):
                self._stopped_since_s.pop(rank.number, None)
            elif now - self._stopped_since_s.setdefault(rank.number, now) > self._grace_s:
                cause = f"is stopped and has not answered {self._stop.sent[0].name} within {self._grace_s:g} s"
                return Failure(rank, cause, RankLostError.exit_code, False)
        beats = self._heartbeats
        silent = [rank for rank in running if beats is not None and beats.is_lost(rank)]
        if beats is not None and silent and silent == running:
            cause = f"has shown no sign of life for {beats.limit_s:g} s, like every other rank"
            return Failure(running[0], cause, RankLostError.exit_code, False)
        return None


def _precedence(rank: Rank) -> tuple[bool, bool, bool, int]:
    code = rank.process.returncode
    was_aborted, may_follow = code == -signal.SIGABRT, code in (1, RankLostError.exit_code)
    return may_follow, was_aborted, code > 0, rank.number


def exit_code_of(code: int) -> int:
    """Converts a subprocess return code to the exit code of a shell, which is 128 + number for a signal.

    SIGABRT gives 5: NCCL's watchdog aborts a process that has lost a peer, past all of Python's handlers, and a lost
    rank must give the same exit code under every backend.
    """
    if code == -signal.SIGABRT:
        return RankLostError.exit_code
    return code if code >= 0 else 128 - code


def _is_stopped(rank: Rank) -> bool:
    """Returns whether SIGSTOP has suspended the rank; a debugger's stop is another state."""
    with suppress(psutil.Error):
        return bool(psutil.Process(rank.process.pid).status() == psutil.STATUS_STOPPED)
    return False


def _processor_seconds(rank: Rank) -> float:
    with suppress(psutil.Error):
        times = psutil.Process(rank.process.pid).cpu_times()
        return float(times.user + times.system)
    return 0.0
