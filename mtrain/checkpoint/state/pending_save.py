"""A save that is under way, and its outcome on each rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch

from mtrain.base.errors import MachineError, MtrainError, RunFolderError, SpoiledStateError
from mtrain.checkpoint.format.training_state import TrainingState
from mtrain.checkpoint.format.writer import Written
from mtrain.checkpoint.store.directory import StagingDir
from mtrain.checkpoint.store.manifest import CheckpointInfo
from mtrain.core.ranks.all_reduce import AsyncVote
from mtrain.core.ranks.init import any_rank
from mtrain.core.state.finite import NonFinite, described


class Stage(Enum):
    """What the ranks do for a save."""

    WRITING = "writing"
    """Each rank writes its file."""
    PUBLISHING = "publishing"
    """All have written, and the first rank lists and publishes the files."""


@dataclass
class PendingSave:
    """A save that has begun."""

    staging: StagingDir
    state: TrainingState
    facts: CheckpointInfo
    work: Future[Any]
    """Work that this rank is doing for it now."""
    began_s: float
    blocked_s: float = 0.0
    """Seconds that training waited for the copy; without checkpoint.async_save it waits for the whole save."""
    stage: Stage = Stage.WRITING
    _vote: AsyncVote | None = None
    """Vote on whether a rank is busy."""

    def was_ready(self, limit_s: float, device: torch.device) -> bool:
        """Says whether no rank was busy at the last call, and asks for the next one. Collective over the world.

        No rank waits for another one, and no host for its device: a rank that was ready stays ready, so an answer may
        be late.

        Args:
            limit_s: Seconds after which a save counts as ended.
        """
        asked, self._vote = self._vote, None
        if asked is not None and not asked.read():
            return True
        self._vote = AsyncVote(self._is_busy(limit_s), device)
        return False

    def is_ready(self, limit_s: float, device: torch.device) -> bool:
        """Says whether no rank is busy now; the host waits for all of them. Collective over the world."""
        if self._vote is not None:
            self._vote.read()  # every rank has to take part in it to the end
            self._vote = None
        return not any_rank(self._is_busy(limit_s), device)

    def outcome(self) -> Outcome | None:
        """Returns the outcome on this rank of work that is done; None if the work returns nothing."""
        fault = self.work.exception()
        if fault is None or isinstance(fault, MtrainError):
            return self.work.result() if fault is None else fault
        return MachineError(f"{type(fault).__name__}: {fault}")

    def _is_busy(self, limit_s: float) -> bool:
        return not self.work.done() and time.monotonic() - self.began_s < limit_s


Outcome: TypeAlias = Written | NonFinite | MtrainError
"""Result of the writing of one rank."""


def first_fault(everyone: Sequence[Outcome | None]) -> MtrainError | None:
    """Returns the first fault; a state that is not finite comes before a disk error."""
    not_finite = described([outcome if isinstance(outcome, NonFinite) else None for outcome in everyone])
    for rank, outcome in enumerate(everyone):
        if isinstance(outcome, RunFolderError):
            return outcome
        if isinstance(outcome, MtrainError) and not_finite is None:
            return MachineError(f"rank {rank}: {outcome}")
    return None if not_finite is None else SpoiledStateError(not_finite)
