"""The pair: a loss that has not been averaged yet.

A mean cannot be added across microbatches, ranks or masks; a sum can. So a loss function returns both parts and the
division happens once, in `mtrain/mcore/finalize.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mtrain.loss.vocab_parallel import VocabParallelLogits

MAIN_TERM = "main"
"""Name of the term that `loss.function` computes; side terms carry the names of the config."""


class LossPair(NamedTuple):
    """Local partial sums of one term; pairs add, and (0, 0) is neutral."""

    numerator: Tensor
    """float32 scalar with a graph: sum over this rank's tokens of weight x loss, in nats."""
    denominator: Tensor
    """float64 scalar without a graph: this rank's share of the divisor."""


@dataclass(frozen=True)
class TermInputs:
    """What a loss function sees: one microbatch, the part of the sequence that this context-parallel rank owns."""

    logits: VocabParallelLogits
    """[seq, batch, vocab_local]; knows its shard of the vocabulary and the group that holds the rest."""
    labels: Tensor
    """[batch, seq] int64: the token to predict at each position; meaningless where the weight is 0."""
    weights: Tensor
    """[batch, seq] float32: what each token's loss is multiplied by, as the term's aggregation says; 0 where masked."""
    shares: Tensor
    """[batch, seq] float64: each token's share of the denominator; adds up to it over the global batch."""
    tokens: Tensor
    """[batch, seq] int64."""
    teacher: VocabParallelLogits | None = None
    """The frozen teacher's logits of the same tokens, split like the model's; None where the run has no teacher."""


LossFunction = Callable[[TermInputs], LossPair]

Function = TypeVar("Function", bound=Callable[..., LossPair])


def needs_teacher(function: Function) -> Function:
    """Marks a loss function that reads `TermInputs.teacher`: a run without `loss.teacher` refuses it.

    The teacher runs for marked functions; an unmarked one finds it only where another term needs it.
    """
    function.__dict__["needs_teacher"] = True
    return function


def weigh(token_losses: Tensor, inputs: TermInputs) -> LossPair:
    """Sums weight x loss and the shares; how nearly every loss function ends.

    A token of weight 0 adds exactly 0, and its loss gets gradient 0, even where the loss is inf or nan. (A function
    that goes on from there can still turn this 0 into nan, as the square of inf does: mask what goes into it.) The
    numerator keeps its graph when all tokens are masked.

    Args:
        token_losses: [batch, seq], of float32 or wider, one loss a token.
        inputs: The microbatch whose weights and shares count.
    """
    kept = torch.where(inputs.weights != 0, token_losses * inputs.weights, 0.0)
    return LossPair(kept.sum().float(), inputs.shares.sum(dtype=torch.float64))
