"""The events of a run's life: it starts, goes on after a step, saves, and ends in one of three ways."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import TracebackType

from mtrain.base.errors import MtrainError, RankLostError, RunFolderError
from mtrain.config import Config
from mtrain.runs.events import EventKind, EventLog, Fact
from mtrain.runs.folder import RunFolder

_RANKS_THAT_TELL_OF_LOST_ONES = 2
"""Every rank loses the one that died; the second one tells where that is the first."""


class Life:
    """Inside the `with` block this start of the run lives; leaving it writes down how it ended."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        """
        Args:
            folder: The run folder, whose lock the first rank holds.
            rank: Of this process.
        """
        self._folder, self._rank = folder, rank
        self._log = EventLog(folder.events, rank)
        self._step = 0
        self._stop: str | None = None
        self._check: Callable[[], None] = lambda: None

    def __enter__(self) -> Life:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            if self._tells(error):
                text = f"{type(error).__name__}: {error}"
                self._log.write(EventKind.FAILURE, self._step, text, {"exit_code": _exit_code(error)})
        elif self._stop is not None:
            self._log.write(EventKind.STOP, self._step, self._stop)
        elif self._rank == 0:
            self._log.write(EventKind.FINISH, self._step)

    def started(self, config: Config, environment: Mapping[str, str], check: Callable[[], None]) -> None:
        """The run folder is this start's, as long as `check` raises nothing. On rank 0."""
        self._check = check
        known: dict[str, Fact] = {"num_steps": config.train.num_steps, "name": config.run.name}
        known |= {key: environment[key] for key in ("mtrain", "device", "layout")}
        known |= {"world_size": int(environment["world_size"]), "job": os.environ.get("SLURM_JOB_ID")}
        self._log.write(EventKind.START, 0, facts=known)

    def resumed(self, step: int, reached: int) -> None:
        """The model is built.

        Args:
            step: Updates completed; training goes on after them.
            reached: Steps that earlier starts have recorded; those beyond `step` are repeated.
        """
        self._step = step
        if self._rank == 0:
            self._log.write(EventKind.RESUME, step, facts={"reached": max(reached, step)})

    def stepped(self, step: int) -> None:
        """So many updates are completed."""
        self._step = step

    def saved(self, step: int, seconds: float) -> None:
        """A checkpoint is on disk. On rank 0."""
        self._folder.note_save(seconds)
        self._log.write(EventKind.SAVE, step, facts={"seconds": round(seconds, 3)})

    def alarmed(self, step: int, text: str, facts: Mapping[str, Fact] | None = None) -> None:
        """Something that people should see, while the run goes on."""
        if self._rank == 0:
            self._log.write(EventKind.ALARM, step, text, facts)

    def rolled_back(self, step: int, from_step: int, text: str) -> None:
        """The run goes on from the checkpoint of `step`, and `from_step` was bad."""
        self._step = step
        if self._rank == 0:
            self._log.write(EventKind.ROLLBACK, step, text, {"from_step": from_step})

    def stopped(self, reason: str) -> None:
        """The run ends early and wants to be started again. On rank 0."""
        self._check()
        self._folder.set_requeue(reason)
        self._stop = reason

    def _tells(self, error: BaseException) -> bool:
        """Whether this rank writes it down: once is enough for what all ranks see."""
        if isinstance(error, RunFolderError):  # the life that goes on there is another start's
            return False
        if isinstance(error, RankLostError):
            return self._rank < _RANKS_THAT_TELL_OF_LOST_ONES
        return self._rank == 0 or not (isinstance(error, MtrainError) and error.on_every_rank)


def _exit_code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, MtrainError) else 1
