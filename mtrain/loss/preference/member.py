"""What a sequence is in the group that it is compared in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["chosen", "rejected", "mismatched"]
ROLES: tuple[Role, ...] = ("chosen", "rejected", "mismatched")
"""By the number that stands for them in `ScoredSequences.roles`."""


@dataclass(frozen=True)
class GroupMember:
    """A sequence's part in the group that a preference loss looks at as a whole.

    All sequences of a group belong into the same call of `Engine.forward_backward`, or the same step of a run, wherever
    they lie in it.
    """

    group: int
    """Whole number, at least 0, of the pair or of the answer that is judged alone; unique in the batch."""
    role: Role
    """chosen: the better answer of a pair, or one that is wanted. rejected: the worse one, or one that is not wanted.
    mismatched: an answer under the prompt of another, by which KTO measures how far the model has moved."""
    reference: float | None = None
    """Score of the sequence under the reference model, as `Engine.scores` gives it: the sum of the log-probabilities of
    its weighed tokens, or their mean where loss.aggregation=seq-mean-token-mean. None: the loss needs none."""
    margin: float = 0.0
    """Of a chosen sequence, by how much it is said to be better than the rejected one; read by reward_model."""
