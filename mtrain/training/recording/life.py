"""Events of a run: start, resume, save, and end in one of three ways."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from types import TracebackType

from mtrain.base.errors import MtrainError, RankLostError, RunFolderError
from mtrain.checkpoint.store.steps import published_steps
from mtrain.config import Config
from mtrain.runs.events import EventKind, EventLog, Fact
from mtrain.runs.folder import RunFolder

_log = logging.getLogger(__name__)

_RANKS_THAT_TELL_OF_LOST_ONES = 2
"""Number of ranks that report a lost rank; the second one reports if the first has died."""


class Life:
    """Event log of a start, for a `with` block; leaving the block records how the start ended."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._log = EventLog(folder.events, rank)
        self._step = self._num_steps = 0
        self._way_on = "the same command goes on"
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
        """Records that the start has claimed the run folder, as long as `check` does not raise. On rank 0."""
        self._check, self._num_steps = check, config.train.num_steps
        if config.checkpoint.resume == "never":
            self._way_on = "checkpoint.resume=auto goes on"
        known: dict[str, Fact] = {"num_steps": config.train.num_steps, "name": config.run.name}
        known |= {key: environment[key] for key in ("mtrain", "device", "layout")}
        known |= {"world_size": int(environment["world_size"]), "job": os.environ.get("SLURM_JOB_ID")}
        self._log.write(EventKind.START, 0, facts=known)

    def resumed(self, step: int, reached: int) -> None:
        """Records that the model is built and training continues.

        Args:
            reached: Number of steps that earlier starts have recorded; those beyond `step` are repeated.
        """
        self._step = step
        if self._rank == 0:
            self._log.write(EventKind.RESUME, step, facts={"reached": max(reached, step)})

    def stepped(self, step: int) -> None:
        """Notes the number of completed updates."""
        self._step = step

    def saved(self, step: int, seconds: float) -> None:
        """Records that a checkpoint is on disk. On rank 0."""
        self._folder.note_save(seconds)
        self._log.write(EventKind.SAVE, step, facts={"seconds": round(seconds, 3)})

    def alarmed(self, step: int, text: str, facts: Mapping[str, Fact] | None = None) -> None:
        """Records something that people should see, while the run goes on."""
        if self._rank == 0:
            self._log.write(EventKind.ALARM, step, text, facts)

    def rolled_back(self, step: int, from_step: int, text: str) -> None:
        """Records that the run has gone back to the checkpoint of `step`, because `from_step` was bad."""
        self._step = step
        if self._rank == 0:
            self._log.write(EventKind.ROLLBACK, step, text, {"from_step": from_step})

    def stopped(self, reason: str) -> None:
        """Notes that the run ends early and has to be started again, and tells the user how. On rank 0."""
        self._check()
        self._folder.set_requeue(reason)
        self._stop = reason
        saved = max(published_steps(self._folder.checkpoints), default=0)
        step = max(self._step, saved)  # before the model is built only the checkpoints are known
        start = "" if saved == step else f" from step {saved}"  # the last save has failed
        _log.info(f"stopped at step {step} of {self._num_steps}; {self._way_on}{start}")

    def _tells(self, error: BaseException) -> bool:
        """Says whether this rank records an error: an error of all ranks is recorded once."""
        if isinstance(error, RunFolderError):  # the folder belongs to another start
            return False
        if isinstance(error, RankLostError):
            return self._rank < _RANKS_THAT_TELL_OF_LOST_ONES
        return self._rank == 0 or not (isinstance(error, MtrainError) and error.on_every_rank)


def _exit_code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, MtrainError) else 1
