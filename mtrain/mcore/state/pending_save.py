"""A save that is under way, and how its ranks fared."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mtrain.base.errors import MachineError, MtrainError, RunFolderError, SpoiledStateError
from mtrain.checkpoint.format.finite import Finding, described
from mtrain.checkpoint.format.training_state import TrainingState
from mtrain.checkpoint.format.writer import Written
from mtrain.checkpoint.store.directory import StagingDir
from mtrain.checkpoint.store.manifest import CheckpointInfo


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
