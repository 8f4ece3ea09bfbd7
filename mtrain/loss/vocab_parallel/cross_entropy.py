"""Nodes of the autograd graph for losses of one distribution: cross entropy, log-sum-exp and entropy.

All tensors of one number per token are [seq, batch], in the order of the logits; no node communicates, forward or
backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.loss.vocab_parallel.exponentials import Exponentials, cleared, softmax_times


@dataclass(frozen=True)
class TargetLogits:
    """Target distribution: mostly the label, and a little of every real token if labels are smoothed; [seq, batch]."""

    column: Tensor
    """Local column of the label; 0 where another rank holds it."""
    is_local: Tensor
    """Whether this rank holds the label's column."""
    shifted_logit: Tensor
    """Mean logit under the target distribution, minus the token's maximum."""
    label_share: float
    """Probability that the target gives to the label alone: 1 - smoothing."""
    uniform_share: float
    """Probability that the target gives to every real token, the label included: smoothing / vocab_size."""


class CrossEntropy(torch.autograd.Function):
    """Autograd node (logits) -> (cross entropy, log-sum-exp)."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, exponentials: Exponentials, target: TargetLogits) -> tuple[Tensor, Tensor]:
        # not the logits: softmax follows from the exponentials, a tensor that other terms of the microbatch save too
        ctx.save_for_backward(exponentials.values, exponentials.total, target.column, target.is_local)
        ctx.num_real, ctx.dtype = exponentials.num_real, local.dtype
        ctx.label_share, ctx.uniform_share = target.label_share, target.uniform_share
        log_total = exponentials.total.log()
        # The maximum cancels in the first, since target probabilities add up to 1: no large numbers are subtracted.
        return log_total - target.shifted_logit, log_total + exponentials.maximum

    @staticmethod
    # a second derivative would ignore tensors that are saved without a graph: it raises instead of being wrong
    @once_differentiable
    def backward(ctx: Any, grad_entropy: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor, None, None]:
        values, total, column, is_local = ctx.saved_tensors
        # Both losses have the softmax as gradient, so one pass over [seq, batch, vocab_local] serves both. The gradient
        # of an output that no term used arrives as zeros, since autograd materialises gradients.
        scale, column = grad_entropy + grad_logsumexp, column.unsqueeze(-1)
        is_masked = (grad_entropy == 0) & (grad_logsumexp == 0)
        exponentials = Exponentials(values, total, total, ctx.num_real)
        # without smoothing the gradient is softmax x scale alone, and None skips a read
        shift = grad_entropy * ctx.uniform_share if ctx.uniform_share > 0 else None
        gradient = softmax_times(exponentials, scale, is_masked, ctx.dtype, shift)
        # softmax x scale minus the label's share, formed in full precision: near 1 the two almost cancel
        at_label = values.gather(-1, column).squeeze(-1) / total * scale
        at_label = at_label - grad_entropy * (ctx.label_share + ctx.uniform_share)
        is_set = is_local & ~is_masked
        # Where another rank holds the label, column 0 gets its old value back: so the scatter needs no boolean index,
        # for which the host would have to wait.
        kept = torch.where(is_set, at_label.to(ctx.dtype), gradient.gather(-1, column).squeeze(-1))
        return gradient.scatter_(-1, column, kept.unsqueeze(-1)), None, None


class LogSumExp(torch.autograd.Function):
    """Autograd node (logits) -> log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, exponentials: Exponentials) -> Tensor:
        ctx.save_for_backward(exponentials.values, exponentials.total)
        ctx.num_real, ctx.dtype = exponentials.num_real, local.dtype
        return exponentials.total.log() + exponentials.maximum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logsumexp: Tensor) -> tuple[Tensor, None]:
        values, total = ctx.saved_tensors
        exponentials = Exponentials(values, total, total, ctx.num_real)
        return softmax_times(exponentials, grad_logsumexp, grad_logsumexp == 0, ctx.dtype), None


class Entropy(torch.autograd.Function):
    """Autograd node (logits) -> entropy. Where s = logit - maximum and m is the mean of s, dH/ds_j = -p_j (s_j - m)."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, exponentials: Exponentials, mean: Tensor) -> Tensor:
        ctx.save_for_backward(exponentials.values, exponentials.total, mean)
        ctx.num_real, ctx.dtype = exponentials.num_real, local.dtype
        return exponentials.total.log() - mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_entropy: Tensor) -> tuple[Tensor, None, None]:
        values, total, mean = ctx.saved_tensors
        # exp(s) s from exp(s) alone: underflowed exponentials have no weight, and the logits need not be kept
        gradient = torch.xlogy(values, values).addcmul_(values, mean.unsqueeze(-1), value=-1)
        # in place in full precision and rounded once at the end, as the two products almost cancel for a flat
        # distribution
        gradient.mul_((-grad_entropy / total).unsqueeze(-1))
        return cleared(gradient, grad_entropy == 0, ctx.num_real).to(ctx.dtype), None, None
