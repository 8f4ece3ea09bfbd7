"""Membership of a sequence in a group of compared sequences; free of torch, since data are read without it."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["chosen", "rejected", "mismatched"]
ROLES: tuple[Role, ...] = ("chosen", "rejected", "mismatched")
"""Roles in the order of their numbers in `ScoredSequences.roles`."""


@dataclass(frozen=True)
class GroupMember:
    """Membership of a sequence in a group, which a preference loss judges as a whole.

    All sequences of a group must be in the same call of `Engine.forward_backward`, or in the same step of a run, in any
    order.
    """

    group: int
    """Number of the pair, or of the single answer; at least 0, unique in the batch."""
    role: Role
    """Role in the group. chosen: the better answer of a pair, or a single good answer. rejected: the worse answer of a
    pair, or a single bad answer. mismatched: an answer to another prompt, used by KTO to measure how far the model has
    moved."""
    reference: float | None = None
    """Score of the sequence under the reference model, as `Engine.scores` returns it: the sum of the log-probabilities
    of its weighted tokens, or their mean if loss.aggregation=seq-mean-token-mean. None if the loss needs no
    reference."""
    margin: float = 0.0
    """Margin by which the labels rate a chosen sequence above the rejected one; read by reward_model."""
