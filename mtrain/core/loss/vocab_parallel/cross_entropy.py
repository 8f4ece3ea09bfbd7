"""Losses of one distribution over a split vocabulary: cross entropy, log-sum-exp and entropy.

All losses build on exponentials, the softmax before its division. Without compilation, the exponentials of a rank's
columns are computed once, kept in full precision and shared by all losses of a microbatch; compiled regions recompute
them from the logits in each pass. The losses are autograd nodes that do not communicate. Tensors with one number per
token are [seq, batch], in the order of the logits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.core.kernels import region

ELEMENTS_AT_A_TIME = 2**24
"""Largest number of elements of a temporary tensor: 64 MiB in float32."""


@dataclass(frozen=True)
class Exponentials:
    """Exponentials of the logits: the values exp(logit - maximum), with 0 at padding."""

    source: Tensor
    """The values, or the logits if compiled regions recompute the values: the only [seq, batch, vocab_local] tensor
    saved for backward."""
    maximum: Tensor
    """Largest logit of each token over the whole vocabulary, [seq, batch]."""
    total: Tensor
    """Sum of each token's values over the whole vocabulary, [seq, batch]."""
    num_real: int
    """Number of local columns that are not padding."""
    is_compiled: bool
    """Whether `source` holds logits."""
    is_consumed: bool
    """Whether one node alone reads the source, so that its gradient may overwrite it."""

    def values(self) -> Tensor:
        """Returns the values, [seq, batch, vocab_local]."""
        return exponentials_of(self.source, self.maximum, self.num_real) if self.is_compiled else self.source

    def at(self, column: Tensor) -> Tensor:
        """Returns the values in the given real columns; both are [seq, batch, k]."""
        gathered = self.source.gather(-1, column)
        return (gathered - self.maximum.unsqueeze(-1)).exp() if self.is_compiled else gathered

    def save(self, ctx: Any, *further: Tensor) -> None:
        """Saves the exponentials and further tensors of a node; `saved` returns them in backward."""
        ctx.save_for_backward(self.source, self.maximum, self.total, *further)
        ctx.num_real, ctx.is_compiled, ctx.is_consumed = self.num_real, self.is_compiled, self.is_consumed


def saved(ctx: Any) -> tuple[Exponentials, tuple[Tensor, ...]]:
    """Returns the exponentials and further tensors saved by `Exponentials.save`."""
    source, maximum, total, *further = ctx.saved_tensors
    return Exponentials(source, maximum, total, ctx.num_real, ctx.is_compiled, ctx.is_consumed), tuple(further)


def exponentials_of(local: Tensor, maximum: Tensor, num_real: int, is_consumed: bool = False) -> Tensor:
    """Computes exp(logit - maximum), [seq, batch, vocab_local], in the dtype of the maximum; 0 at padding. Consumed
    logits of that dtype are overwritten."""
    return shifted_logits(local, maximum, num_real, is_consumed).exp_()


@region(activations=0)
def maximum_and_total(local: Tensor, num_real: int) -> tuple[Tensor, Tensor]:
    """Returns each token's largest real logit on this rank and the sum of exp(logit - largest), [seq, batch]; -inf and
    0 if no logit is above -inf."""
    # with keepdim, since torch's compiler turns exactly this form into one pass over the logits
    real = local[..., :num_real].to(compute_dtype(local))
    maximum = real.amax(-1, keepdim=True)
    total = (real - maximum).exp().sum(-1, keepdim=True)
    total = torch.where(maximum == float("-inf"), 0.0, total)
    return maximum.squeeze(-1), total.squeeze(-1)


@region(activations=0)
def softmax_of_logits(
    local: Tensor, maximum: Tensor, factor: Tensor, shift: Tensor | None, is_masked: Tensor, num_real: int
) -> Tensor:
    """Computes exp(logit - maximum) x factor - shift in the logits' dtype; exactly 0 at masked tokens and padding."""
    gradient = (local.to(maximum.dtype) - maximum.unsqueeze(-1)).exp() * factor.unsqueeze(-1)
    if shift is not None:
        gradient = gradient - shift.unsqueeze(-1)
    is_padding = torch.arange(local.shape[-1], device=local.device) >= num_real
    return torch.where(is_masked.unsqueeze(-1) | is_padding, 0.0, gradient).to(local.dtype)


@region(activations=0)
def softmax_over_logits(
    local: Tensor, maximum: Tensor, factor: Tensor, shift: Tensor | None, is_masked: Tensor, num_real: int
) -> Tensor:
    """Computes `softmax_of_logits` into the memory of the logits."""
    return local.copy_(softmax_of_logits(local, maximum, factor, shift, is_masked, num_real))


def shifted_logits(local: Tensor, maximum: Tensor, num_real: int, is_consumed: bool = False) -> Tensor:
    """Returns the logits, [..., vocab_local], minus the maximum of their token, [...], in the dtype of the maximum;
    -inf at padding. Consumed logits of that dtype are overwritten."""
    logits = local.detach()
    # bf16 - float32 gives float32; local.float() would be one more copy of the logits
    output = logits if is_consumed and logits.dtype == maximum.dtype else None
    shifted = torch.sub(logits, maximum.unsqueeze(-1), out=output)
    shifted[..., num_real:] = float("-inf")
    return shifted


def local_maximum(local: Tensor, num_real: int) -> Tensor:
    """Returns each token's largest real logit on this rank, [seq, batch]; -inf if the rank holds only padding."""
    real = local.detach()[..., :num_real]
    dtype = compute_dtype(local)
    # amax over no columns raises
    if num_real == 0:
        return torch.full(real.shape[:-1], float("-inf"), dtype=dtype, device=real.device)
    return real.amax(-1).to(dtype)


def softmax_times(
    exponentials: Exponentials, scale: Tensor, is_masked: Tensor, dtype: torch.dtype, shift: Tensor | None = None
) -> Tensor:
    """Computes softmax x scale - shift, [seq, batch, vocab_local], rounded once to `dtype`; 0 at padding columns.

    Scale, shift and mask are [seq, batch]. Masked tokens get exactly 0, even if their logits are inf or nan.
    """
    factor = scale / exponentials.total
    if exponentials.is_compiled:
        compute = (softmax_over_logits if exponentials.is_consumed else softmax_of_logits).compiled_if(True)
        return compute(exponentials.source, exponentials.maximum, factor, shift, is_masked, exponentials.num_real)
    values, factor = exponentials.source, factor.unsqueeze(-1)
    # out= with a smaller dtype computes in full precision and rounds when storing (CPUs use a temporary)
    is_overwritten = exponentials.is_consumed and values.dtype == dtype
    gradient = values if is_overwritten else torch.empty_like(values, dtype=dtype)
    if shift is None:
        torch.mul(values, factor, out=gradient)
    else:
        torch.addcmul(-shift.unsqueeze(-1), values, factor, out=gradient)
    return cleared(gradient, is_masked, exponentials.num_real)


def cleared(gradient: Tensor, is_masked: Tensor, num_real: int) -> Tensor:
    """Sets the gradient to exactly 0 at masked tokens and padding, in place, and returns it."""
    # filled, not multiplied by 0, since the softmax of a masked token with inf logits is nan
    if gradient.device.type == "cpu":
        # masked rows are few; on a GPU the host would have to wait for their indices
        gradient[is_masked.nonzero(as_tuple=True)] = 0.0
    else:
        gradient.masked_fill_(is_masked.unsqueeze(-1), 0.0)
    gradient[..., num_real:] = 0.0
    return gradient


def row_slices(local: Tensor) -> Iterator[slice]:
    """Yields slices of positions with at most ELEMENTS_AT_A_TIME logits each (but at least one position)."""
    step = max(1, ELEMENTS_AT_A_TIME // max(1, math.prod(local.shape[1:])))
    for start in range(0, local.shape[0], step):
        yield slice(start, start + step)


def compute_dtype(local: Tensor) -> torch.dtype:
    """Returns float32, or float64 for float64 logits, which the references of `mtrain verify` use."""
    return torch.promote_types(local.dtype, torch.float32)


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    """Reduces a tensor over the group in place; does nothing if the group is None or has one rank."""
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)


@dataclass(frozen=True)
class TargetLogits:
    """Target distribution of each token, the label or, with label smoothing, the label mixed with a uniform
    distribution; tensors are [seq, batch]."""

    column: Tensor
    """Local column of the label; 0 if another rank holds it."""
    is_local: Tensor
    """Whether this rank holds the label's column."""
    shifted_logit: Tensor
    """Mean logit under the target distribution, minus the maximum of the token."""
    label_share: float
    """Probability of the label before the uniform part is added: 1 - smoothing."""
    uniform_share: float
    """Uniform part of the probability of every real token, including the label: smoothing / vocab_size."""


class CrossEntropy(torch.autograd.Function):
    """Autograd node (logits) -> (cross entropy, log-sum-exp)."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, exponentials: Exponentials, target: TargetLogits) -> tuple[Tensor, Tensor]:
        # backward computes the softmax from the exponentials, which other terms of the microbatch share
        exponentials.save(ctx, target.column, target.is_local)
        ctx.dtype = local.dtype
        ctx.label_share, ctx.uniform_share = target.label_share, target.uniform_share
        log_total = exponentials.total.log()
        # the maximum cancels in the cross entropy, since target probabilities add up to 1
        return log_total - target.shifted_logit, log_total + exponentials.maximum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_entropy: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor, None, None]:
        exponentials, (column, is_local) = saved(ctx)
        # the softmax is in the gradient of both losses; autograd passes zeros for an output that no term used
        scale, column = grad_entropy + grad_logsumexp, column.unsqueeze(-1)
        is_masked = (grad_entropy == 0) & (grad_logsumexp == 0)
        # without smoothing no shift is needed, and None saves a read
        shift = grad_entropy * ctx.uniform_share if ctx.uniform_share > 0 else None
        # in full precision, since near a softmax of 1 the two terms almost cancel; before the gradient, which may
        # overwrite the exponentials
        at_label = exponentials.at(column).squeeze(-1) / exponentials.total * scale
        at_label = at_label - grad_entropy * (ctx.label_share + ctx.uniform_share)
        gradient = softmax_times(exponentials, scale, is_masked, ctx.dtype, shift)
        is_set = is_local & ~is_masked
        # if another rank holds the label, column 0 gets its old value back; a boolean index would make the host wait
        at_column = torch.where(is_set, at_label.to(ctx.dtype), gradient.gather(-1, column).squeeze(-1))
        return gradient.scatter_(-1, column, at_column.unsqueeze(-1)), None, None


class LogSumExp(torch.autograd.Function):
    """Autograd node (logits) -> log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, exponentials: Exponentials) -> Tensor:
        exponentials.save(ctx)
        ctx.dtype = local.dtype
        return exponentials.total.log() + exponentials.maximum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logsumexp: Tensor) -> tuple[Tensor, None]:
        return softmax_times(saved(ctx)[0], grad_logsumexp, grad_logsumexp == 0, ctx.dtype), None


class Entropy(torch.autograd.Function):
    """Autograd node (logits) -> entropy. With s = logit - maximum and m the mean of s, dH/ds_j = -p_j (s_j - m)."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, exponentials: Exponentials, mean: Tensor) -> Tensor:
        exponentials.save(ctx, mean)
        ctx.dtype = local.dtype
        return exponentials.total.log() - mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_entropy: Tensor) -> tuple[Tensor, None, None]:
        exponentials, (mean,) = saved(ctx)
        values = exponentials.values()
        # exp(s) s computed from exp(s) alone, so that the logits need not be saved
        gradient = torch.xlogy(values, values).addcmul_(values, mean.unsqueeze(-1), value=-1)
        # rounded once at the end, since the two products almost cancel for a flat distribution
        gradient.mul_((-grad_entropy / exponentials.total).unsqueeze(-1))
        return cleared(gradient, grad_entropy == 0, ctx.num_real).to(ctx.dtype), None, None
