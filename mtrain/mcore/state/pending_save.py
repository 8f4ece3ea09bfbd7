"""A save that is under way, and how its ranks fared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from mtrain.base.errors import MachineError, MtrainError, RunFolderError, SpoiledStateError
from mtrain.checkpoint.format.finite import Finding, described
from mtrain.checkpoint.format.training_state import TrainingState
from mtrain.checkpoint.format.writer import Written
from mtrain.checkpoint.store.directory import StagingDir
from mtrain.checkpoint.store.manifest import CheckpointInfo
from mtrain.mcore.distributed.all_reduce import AsyncVote
from mtrain.mcore.distributed.init import any_rank


@dataclass
class PendingSave:
    """A save that has begun."""

    attempt: StagingDir
    state: TrainingState
    facts: CheckpointInfo
    work: Future[Any]
    """What this rank does for it now."""
    began_s: float
    blocked_s: float = 0.0
    """How long training waited for the copy; without checkpoint.async_save it waits for all of the save."""
    has_written: bool = field(default=False)
    """Whether all ranks have; then the first one publishes."""
    _vote: AsyncVote | None = field(default=None)
    """Whether a rank was busy when this was asked."""

    def was_ready(self, limit_s: float, device: torch.device) -> bool:
        """Whether at the last call no rank was busy; asks for the next one. Collective over the world.

        No rank waits for another one, and no host for its device: who was ready stays so, so an answer may be late.

        Args:
            limit_s: After which a save counts as ended.
            device: Of this rank.
        """
        asked, self._vote = self._vote, None
        if asked is not None and not asked.read():
            return True
        self._vote = AsyncVote(self._is_busy(limit_s), device)
        return False

    def is_ready(self, limit_s: float, device: torch.device) -> bool:
        """Whether no rank is busy now; the host waits for all of them. Collective over the world."""
        if self._vote is not None:
            self._vote.read()  # every rank has to take part to its end
            self._vote = None
        return not any_rank(self._is_busy(limit_s), device)

    def outcome(self) -> Outcome | None:
        """Of work that is done: how this rank fared; None of what gives nothing."""
        fault = self.work.exception()
        if fault is None or isinstance(fault, MtrainError):
            return self.work.result() if fault is None else fault
        return MachineError(f"{type(fault).__name__}: {fault}")

    def _is_busy(self, limit_s: float) -> bool:
        return not self.work.done() and time.monotonic() - self.began_s < limit_s


Outcome: TypeAlias = Written | Finding | MtrainError
"""How the writing of one rank ended."""


def first_fault(everyone: Sequence[Outcome | None]) -> MtrainError | None:
    """A state that is not finite goes before a disk that refuses: no later save can be better."""
    not_finite = described([outcome if isinstance(outcome, Finding) else None for outcome in everyone])
    for rank, outcome in enumerate(everyone):
        if isinstance(outcome, RunFolderError):
            return outcome
        if isinstance(outcome, MtrainError) and not_finite is None:
            return MachineError(f"rank {rank}: {outcome}")
    return None if not_finite is None else SpoiledStateError(not_finite)
