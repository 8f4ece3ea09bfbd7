"""Kullback-Leibler divergences between a trained and a frozen distribution over the same split vocabulary.

Backward recomputes both softmaxes from the logits, a few tokens at a time, so besides the logits only a few numbers per
token are saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.core.loss.vocab_parallel.cross_entropy import Exponentials, cleared, row_slices, saved, shifted_logits


@dataclass(frozen=True)
class Tempered:
    """One of the two distributions: the softmax of logits / temperature."""

    local: Tensor
    """Logits, [seq, batch, vocab_local]."""
    maximum: Tensor
    """Largest logit of each token over the whole vocabulary, [seq, batch]."""
    num_real: int
    """Number of local columns that are not padding."""
    temperature: float

    def scores(self, rows: slice) -> Tensor:
        """Returns (logit - maximum) / temperature of some positions; -inf at padding."""
        # the maximum of logits / T is maximum / T, so one all-reduce serves every temperature
        return shifted_logits(self.local[rows], self.maximum[rows], self.num_real).div_(self.temperature)


def local_sums(weighting: Tempered, other: Tempered) -> Tensor:
    """Returns this rank's part of [sum of exp(a), sum of exp(a) (a - b), sum of exp(b)], [3, seq, batch], for scores a
    of `weighting` and b of `other`. If exp(a) is 0 for a vocabulary entry, it adds nothing to the second sum."""
    sums = torch.empty(3, *weighting.maximum.shape, dtype=weighting.maximum.dtype, device=weighting.local.device)
    for rows in row_slices(weighting.local):
        first, second = weighting.scores(rows), other.scores(rows)
        # before `second` is overwritten, so that at most three temporaries of ELEMENTS_AT_A_TIME elements exist at once
        sums[2, rows] = second.exp().sum(-1)
        gap = torch.sub(first, second, out=second)
        weights = first.exp_()
        gap.masked_fill_(weights == 0, 0.0)  # at padding and underflow both -inf - (-inf) and 0 x inf are nan
        sums[0, rows] = weights.sum(-1)
        sums[1, rows] = gap.mul_(weights).sum(-1)
    return sums


def divergence_of_sums(sums: Tensor) -> Tensor:
    """Computes the sum of p (log p - log q), with p the weighting distribution, from globally summed `local_sums`."""
    # in float64, since for similar distributions the three parts almost cancel
    weights, gaps, other_weights = sums.double().unbind()
    return gaps / weights - weights.log() + other_weights.log()


class Divergence(torch.autograd.Function):
    """Autograd node (student's logits) -> KL(teacher || student), or the reverse if `is_reverse`; [seq, batch]."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        student: Tempered,
        teacher: Tempered,
        log_totals: Tensor,
        value: Tensor,
        is_reverse: bool,
    ) -> Tensor:
        # saving exponentials would take two more full-precision copies of the logits
        ctx.save_for_backward(local, student.maximum, teacher.local, teacher.maximum, log_totals, value)
        ctx.num_real, ctx.temperature, ctx.is_reverse = student.num_real, student.temperature, is_reverse
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        local, maximum, teacher_local, teacher_maximum, log_totals, value = ctx.saved_tensors
        student = Tempered(local, maximum, ctx.num_real, ctx.temperature)
        teacher = Tempered(teacher_local, teacher_maximum, ctx.num_real, ctx.temperature)
        gradient = torch.empty_like(local)
        for rows in row_slices(local):
            # log softmax from the logits, not log(p), so that a p that underflows keeps its logarithm
            log_p = student.scores(rows).sub_(log_totals[0, rows].unsqueeze(-1))
            log_q = teacher.scores(rows).sub_(log_totals[1, rows].unsqueeze(-1))
            if ctx.is_reverse:
                part = _reverse_gradient(log_p, log_q, value[rows])
            else:
                part = log_p.exp_().sub_(log_q.exp_())
            part.mul_((grad_value[rows] / ctx.temperature).unsqueeze(-1))
            gradient[rows] = cleared(part, grad_value[rows] == 0, ctx.num_real)
        return gradient, None, None, None, None, None


def _reverse_gradient(log_p: Tensor, log_q: Tensor, value: Tensor) -> Tensor:
    """Computes p (log p - log q - KL); 0 where p is 0."""
    gap = torch.sub(log_p, log_q, out=log_q).sub_(value.unsqueeze(-1))
    p = log_p.exp_()
    return gap.masked_fill_(p == 0, 0.0).mul_(p)


@dataclass(frozen=True)
class KnownProbabilities:
    """Target distribution: the probabilities of a few known tokens, and the probability of all others together."""

    column: Tensor
    """Local columns of the known tokens, [seq, batch, k]; 0 for a token that another rank holds."""
    is_local: Tensor
    """Whether this rank holds each known token, [seq, batch, k]."""
    known: Tensor
    """Probabilities of the known tokens, [seq, batch, k]."""
    rest: Tensor
    """Probability of all other tokens together, [seq, batch]."""

    def at(self, rows: slice) -> KnownProbabilities:
        """Returns the target of some positions."""
        return KnownProbabilities(self.column[rows], self.is_local[rows], self.known[rows], self.rest[rows])

    def others_of(self, values: Tensor) -> Tensor:
        """Returns a copy of the values, [seq, batch, vocab_local], with exact zeros at the known tokens."""
        # a product, not a scatter: tokens of other ranks point at column 0, which may be a known token of this rank
        factors = torch.where(self.is_local, 0.0, 1.0).to(values.dtype)
        if torch.are_deterministic_algorithms_enabled():
            # torch has no deterministic product on GPUs; the product of zeros and ones is their minimum
            return values * torch.ones_like(values).scatter_reduce(-1, self.column, factors, reduce="amin")
        return values.scatter_reduce(-1, self.column, factors, reduce="prod")


class TopKDivergence(torch.autograd.Function):
    """Autograd node (logits) -> KL(target || model), for a target of known tokens and a rest; `other_total` is the sum
    of the exponentials of all unknown tokens, [seq, batch]."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        exponentials: Exponentials,
        target: KnownProbabilities,
        other_total: Tensor,
        mean_known: Tensor,
    ) -> Tensor:
        exponentials.save(ctx, other_total)
        ctx.target, ctx.dtype = target, local.dtype
        # xlogy: 0 log 0 = 0, even if the model as well gives the rest probability 0
        target_term = torch.xlogy(target.known, target.known).sum(-1) + torch.xlogy(target.rest, target.rest)
        model_term = mean_known + torch.xlogy(target.rest, other_total)
        return target_term - model_term + exponentials.total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (exponentials, (other_total,)), target = saved(ctx), ctx.target
        values, total = exponentials.values(), exponentials.total
        # the gradient is softmax - target, with the rest spread in proportion to the probabilities of the model
        spread = torch.where(target.rest > 0, target.rest / other_total, 0.0)
        gradient = target.others_of(values * (grad * (1 / total - spread)).unsqueeze(-1))
        at_known = (values.gather(-1, target.column) / total.unsqueeze(-1) - target.known) * grad.unsqueeze(-1)
        # tokens of other ranks add 0 to column 0
        gradient.scatter_add_(-1, target.column, torch.where(target.is_local, at_known, 0.0))
        return cleared(gradient, grad == 0, ctx.num_real).to(ctx.dtype), None, None, None, None
