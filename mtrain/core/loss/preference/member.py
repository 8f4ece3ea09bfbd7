"""Role of a sequence in the group in which it is compared; without torch, as data are read without it."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["chosen", "rejected", "mismatched"]
ROLES: tuple[Role, ...] = ("chosen", "rejected", "mismatched")
"""Roles in the order of their numbers in `ScoredSequences.roles`."""


@dataclass(frozen=True)
class GroupMember:
    """Membership of a sequence in a group, which a preference loss sees as a whole.

    All sequences of a group belong in the same call of `Engine.forward_backward`, or in the same step of a run, in any
    order.
    """

    group: int
    """Number of the pair, or of the answer that is judged alone; at least 0, unique in the batch."""
    role: Role
    """Role in the group. chosen: the better answer of a pair, or a wanted answer. rejected: the worse answer of a pair,
    or an unwanted one. mismatched: an answer to another prompt, with which KTO measures how far the model has moved."""
    reference: float | None = None
    """Score of the sequence under the reference model, as `Engine.scores` returns it: the sum of the log-probabilities
    of its weighted tokens, or their mean if loss.aggregation=seq-mean-token-mean. None: the loss needs none."""
    margin: float = 0.0
    """Margin by which a chosen sequence is labelled better than the rejected one; read by reward_model."""
