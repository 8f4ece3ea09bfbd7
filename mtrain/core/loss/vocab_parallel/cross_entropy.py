"""Losses of one distribution over a split vocabulary: cross entropy, log-sum-exp and entropy.

All build on exponentials, the softmax before its division: those of a rank's columns are computed once, kept in full
precision, and shared by the losses of a microbatch. The losses are nodes of the autograd graph, none of which
communicates. All tensors of one number per token are [seq, batch], in the order of the logits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

ELEMENTS_AT_A_TIME = 2**24
"""Number of elements of a temporary: 64 MiB in float32."""


@dataclass(frozen=True)
class Exponentials:
    """Exponentials of the logits, the only [seq, batch, vocab_local] tensor that is kept for backward."""

    values: Tensor
    """Values exp(logit - maximum), [seq, batch, vocab_local]; 0 at padding."""
    maximum: Tensor
    """Largest logit of each token over the whole vocabulary, [seq, batch]."""
    total: Tensor
    """Sum of each token's values over the whole vocabulary, [seq, batch]."""
    num_real: int
    """Number of local columns that are not padding."""


def shifted_logits(local: Tensor, maximum: Tensor, num_real: int) -> Tensor:
    """Returns the logits, [..., vocab_local], minus their token's maximum, [...], in the maximum's dtype; -inf at
    padding."""
    # bf16 - float32 is float32; local.float() would be one more copy of the logits
    shifted = torch.sub(local.detach(), maximum.unsqueeze(-1))
    shifted[..., num_real:] = float("-inf")
    return shifted


def local_maximum(local: Tensor, num_real: int) -> Tensor:
    """Returns each token's largest real logit on this rank, [seq, batch]; -inf if the rank holds only padding."""
    real = local.detach()[..., :num_real]
    dtype = compute_dtype(local)
    # a tensor-parallel rank can hold only padding, and amax over no columns raises
    if num_real == 0:
        return torch.full(real.shape[:-1], float("-inf"), dtype=dtype, device=real.device)
    return real.amax(-1).to(dtype)


def softmax_times(
    exponentials: Exponentials, scale: Tensor, is_masked: Tensor, dtype: torch.dtype, shift: Tensor | None = None
) -> Tensor:
    """Computes softmax x scale - shift in the logits' dtype, rounded once, [seq, batch, vocab_local]; 0 at padding
    columns.

    Scale and shift are numbers of each token, [seq, batch]. Masked tokens get exactly 0, even if their logits are inf
    or nan.
    """
    values, factor = exponentials.values, (scale / exponentials.total).unsqueeze(-1)
    # out= of a smaller dtype: computed in full precision and rounded when stored (CPUs use a temporary)
    gradient = torch.empty_like(values, dtype=dtype)
    if shift is None:
        torch.mul(values, factor, out=gradient)
    else:
        torch.addcmul(-shift.unsqueeze(-1), values, factor, out=gradient)
    return cleared(gradient, is_masked, exponentials.num_real)


def cleared(gradient: Tensor, is_masked: Tensor, num_real: int) -> Tensor:
    """Sets the gradient to exact zeros at masked tokens and at padding, in place, and returns it."""
    # filled, not multiplied by 0: at a masked token with inf logits the softmax is nan
    if gradient.device.type == "cpu":
        # finds the rows first, few or none; on a GPU the host would have to wait for them
        gradient[is_masked.nonzero(as_tuple=True)] = 0.0
    else:
        gradient.masked_fill_(is_masked.unsqueeze(-1), 0.0)
    gradient[..., num_real:] = 0.0
    return gradient


def row_slices(local: Tensor) -> Iterator[slice]:
    """Yields slices of positions whose logits fit into a temporary."""
    step = max(1, ELEMENTS_AT_A_TIME // max(1, math.prod(local.shape[1:])))
    for start in range(0, local.shape[0], step):
        yield slice(start, start + step)


def compute_dtype(local: Tensor) -> torch.dtype:
    """Returns float32, or float64 for float64 logits, as of the references of `mtrain verify`."""
    return torch.promote_types(local.dtype, torch.float32)


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    """Reduces a tensor over the group in place; does nothing if the group is this rank alone."""
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)


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
        # softmax follows from the exponentials, which other terms of the microbatch save as well
        ctx.save_for_backward(exponentials.values, exponentials.total, target.column, target.is_local)
        ctx.num_real, ctx.dtype = exponentials.num_real, local.dtype
        ctx.label_share, ctx.uniform_share = target.label_share, target.uniform_share
        log_total = exponentials.total.log()
        # the maximum cancels in the first, since target probabilities add up to 1
        return log_total - target.shifted_logit, log_total + exponentials.maximum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_entropy: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor, None, None]:
        values, total, column, is_local = ctx.saved_tensors
        # both losses have the softmax as gradient; that of an output that no term used arrives as zeros
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
        # where another rank holds the label, column 0 gets its old value back: a boolean index would make the host wait
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
        # exp(s) s from exp(s) alone, so that the logits need not be kept
        gradient = torch.xlogy(values, values).addcmul_(values, mean.unsqueeze(-1), value=-1)
        # rounded once at the end, as the two products almost cancel for a flat distribution
        gradient.mul_((-grad_entropy / total).unsqueeze(-1))
        return cleared(gradient, grad_entropy == 0, ctx.num_real).to(ctx.dtype), None, None
