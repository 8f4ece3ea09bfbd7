"""Autograd node for the divergence from a few known probabilities.

As in `cross_entropy.py`, tensors of one number per token are [seq, batch], and nothing communicates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.loss.vocab_parallel.exponentials import Exponentials, cleared


@dataclass(frozen=True)
class KnownProbabilities:
    """Target distribution: a few tokens with their probabilities, and the probability of all others together."""

    column: Tensor
    """Local columns of the tokens, [seq, batch, k]; 0 where another rank holds them."""
    is_local: Tensor
    """Whether this rank holds each token, [seq, batch, k]."""
    known: Tensor
    """Probabilities of the tokens, [seq, batch, k]."""
    rest: Tensor
    """Probability of all other tokens together, [seq, batch]."""

    def at(self, rows: slice) -> KnownProbabilities:
        """Returns the target of some positions."""
        return KnownProbabilities(self.column[rows], self.is_local[rows], self.known[rows], self.rest[rows])

    def others_of(self, values: Tensor) -> Tensor:
        """Returns a copy of values, [seq, batch, vocab_local], with exact zeros at the known tokens."""
        # a product, not a scatter: tokens of other ranks all point at column 0, which may be a known token of this rank
        kept = torch.where(self.is_local, 0.0, 1.0).to(values.dtype)
        return values.scatter_reduce(-1, self.column, kept, reduce="prod")


class TopKDivergence(torch.autograd.Function):
    """Autograd node (logits) -> KL(known and rest || model).

    `others` is the sum of the exponentials of all other tokens, [seq, batch].
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        exponentials: Exponentials,
        target: KnownProbabilities,
        others: Tensor,
        mean_known: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(exponentials.values, exponentials.total, others)
        ctx.target, ctx.num_real, ctx.dtype = target, exponentials.num_real, local.dtype
        # xlogy: 0 log 0 = 0, also where the model leaves nothing to tokens that the teacher leaves nothing to
        own = torch.xlogy(target.known, target.known).sum(-1) + torch.xlogy(target.rest, target.rest)
        expected = mean_known + torch.xlogy(target.rest, others)
        return own - expected + exponentials.total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (values, total, others), target = ctx.saved_tensors, ctx.target
        # softmax minus the target, whose rest is spread over the other tokens in proportion to the model's
        # probabilities
        spread = torch.where(target.rest > 0, target.rest / others, 0.0)
        gradient = target.others_of(values * (grad * (1 / total - spread)).unsqueeze(-1))
        at_known = (values.gather(-1, target.column) / total.unsqueeze(-1) - target.known) * grad.unsqueeze(-1)
        # tokens of other ranks add 0 to column 0
        gradient.scatter_add_(-1, target.column, torch.where(target.is_local, at_known, 0.0))
        return cleared(gradient, grad == 0, ctx.num_real).to(ctx.dtype), None, None, None, None
