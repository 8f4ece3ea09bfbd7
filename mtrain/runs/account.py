"""How a start of a run spends its time."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol

from mtrain.base import pulse
from mtrain.runs.goodput import goodput_of
from mtrain.runs.starts import RunStart, read_starts, write_start

_log = logging.getLogger(__name__)

_NUM_SAVES = 8
_NUM_STEPS = 1000
"""Steps whose times are kept; the lost time of a save that takes longer to reach the disk is only estimated."""


class Phases(Protocol):
    """Time that each phase took."""

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds in each phase so far."""


class StartAccount:
    """Account of this start (`mtrain.runs.starts`), which rank 0 keeps inside the `with` block and then prints as
    goodput."""

    def __init__(self, folder: Path, number: int, rank: int, world_size: int) -> None:
        self._folder, self._number, self._is_writer = folder, number, rank == 0
        self._world_size, self._began_s = world_size, _began_s()
        self._phases: Phases | None = None
        self._start_step: int | None = None
        self._step, self._trained_s = 0, 0.0
        self._lost_steps, self._lost_s = 0, 0.0
        self._saves: list[tuple[int, float]] = []
        self._at: dict[int, float] = {}
        self._ended: str | None = None
        self._before_each: Callable[[], None] = lambda: None

    def __enter__(self) -> StartAccount:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended = "done" if kind is None else kind.__name__
        if not self._is_writer:
            return
        try:
            self.write()
            goodput = goodput_of(read_starts(self._folder))
        except OSError:
            return  # a full disk: the account of some seconds ago is still there
        if goodput is not None and self._step and kind is None:
            for line in goodput.lines():
                _log.info(line)

    def phases_of(self, phases: Phases) -> None:
        self._phases = phases

    def before_each(self, action: Callable[[], None]) -> None:
        """Sets an action that runs before each account is written, in the same thread."""
        self._before_each = action

    def goes_on(self, step: int) -> None:
        """Sets the number of updates at the beginning of this start."""
        self._start_step = self._step = step

    def completed(self, step: int, seconds: float) -> None:
        """Counts one more update, which took `seconds`."""
        self._step, self._trained_s = step, self._trained_s + seconds
        self._at[step] = self._trained_s
        if len(self._at) > _NUM_STEPS:
            del self._at[next(iter(self._at))]

    def saved(self, step: int) -> None:
        """Records that the step's checkpoint is on disk."""
        trained_s = self._at.get(step, self._trained_s)
        self._saves = [*self._saves, (step, trained_s)][-_NUM_SAVES:]
        self._at = {later: at for later, at in self._at.items() if later > step}

    def gone_back(self, step: int) -> None:
        """Records that the run goes back to a checkpoint: later updates are lost and will be repeated."""
        begin = step if self._start_step is None else self._start_step
        # for the checkpoint that this start began with, or an earlier one, no time was spent in this start
        kept_s = dict(self._saves).get(step, 0.0)
        self._lost_steps += self._step - max(step, begin)
        self._lost_s += self._trained_s - kept_s
        # updates of earlier starts beyond that checkpoint are lost as in a restart
        self._start_step = min(step, begin)
        self._step, self._trained_s = step, kept_s
        self._saves = [save for save in self._saves if save[0] <= step]
        self._at.clear()

    def write(self) -> None:
        """Writes the account from the heartbeat's thread; raises OSError if the disk refuses."""
        self._before_each()
        if not self._is_writer:
            return
        phases = {} if self._phases is None else self._phases.phases_s
        # includes the time before the heartbeat: programs start, ranks meet and take the folder
        phases["start"] = max(0.0, time.time() - self._began_s - sum(phases.values())) + phases.get("start", 0.0)
        job = os.environ.get("SLURM_JOB_ID")
        start = RunStart(
            number=self._number,
            began_s=self._began_s,
            written_s=time.time(),
            host=socket.gethostname(),
            job=None if job is None else f"{job}-{os.environ.get('SLURM_RESTART_COUNT', '0')}",
            world_size=self._world_size,
            start_step=self._start_step,
            step=self._step,
            trained_s=self._trained_s,
            phases_s=phases,
            saves=tuple(self._saves),
            lost_steps=self._lost_steps,
            lost_s=self._lost_s,
            ended=self._ended,
        )
        write_start(self._folder, start)


def _began_s() -> float:
    """Returns the Unix time at which the program began; in a user's program, the current time."""
    own = pulse.current()
    return time.time() - (0.0 if own is None else time.monotonic() - own.state.opened_s)
