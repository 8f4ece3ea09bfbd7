"""Exponentials of a split vocabulary, the softmax before its division, on which all losses of a distribution build.

The exponentials of a rank's columns are computed once, kept in full precision, and shared by the losses of a
microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_ELEMENTS_AT_A_TIME = 2**24
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
    """Returns the logits minus their token's maximum, in the maximum's dtype; -inf at padding.

    Args:
        local: Logits, [..., vocab_local].
        maximum: Largest logit of each token, [...].
        num_real: Number of local columns that are not padding.
    """
    # bf16 - float32 is float32, on GPUs in one kernel; local.float() first would be one more copy of the logits
    shifted = torch.sub(local.detach(), maximum.unsqueeze(-1))
    # exp(-inf) is exactly 0, so padding is in no sum, whatever its logits are
    shifted[..., num_real:] = float("-inf")
    return shifted


def local_maximum(local: Tensor, num_real: int) -> Tensor:
    """Returns each token's largest real logit on this rank, [seq, batch]; -inf if the rank holds only padding."""
    real = local.detach()[..., :num_real]
    dtype = compute_dtype(local)
    # a tensor-parallel rank can hold only padding, and amax over no columns raises
    if num_real == 0:
        return torch.full(real.shape[:-1], float("-inf"), dtype=dtype, device=real.device)
    # the maximum of bf16 numbers is one of them: exact, so the cast is of [seq, batch] numbers only
    return real.amax(-1).to(dtype)


def softmax_times(
    exponentials: Exponentials, scale: Tensor, is_masked: Tensor, dtype: torch.dtype, shift: Tensor | None = None
) -> Tensor:
    """Computes softmax x scale - shift in the logits' dtype, rounded once.

    Args:
        exponentials: Exponentials of the logits.
        scale: Factor of each token, [seq, batch].
        is_masked: Tokens that get exactly 0, even if their logits are inf or nan, [seq, batch] bool.
        dtype: Dtype of the result.
        shift: Number that is subtracted at every real column, [seq, batch]; None: 0.

    Returns:
        Products, [seq, batch, vocab_local]; every padding column is exactly 0.
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
        # Finds the rows first, few or none: on a GPU the host would have to wait for them. The boolean itself as an
        # index would be one more pass over the gradient.
        gradient[is_masked.nonzero(as_tuple=True)] = 0.0
    else:
        gradient.masked_fill_(is_masked.unsqueeze(-1), 0.0)
    gradient[..., num_real:] = 0.0
    return gradient


def row_slices(local: Tensor) -> Iterator[slice]:
    """Yields slices of positions whose logits fit into a temporary."""
    # along positions, the outermost axis, so that each part is one contiguous stretch of the logits
    step = max(1, _ELEMENTS_AT_A_TIME // max(1, math.prod(local.shape[1:])))
    for start in range(0, local.shape[0], step):
        yield slice(start, start + step)


def compute_dtype(local: Tensor) -> torch.dtype:
    """Returns float32, or float64 for float64 logits."""
    # float64 stays float64: the references of `mtrain verify` go through the same code
    return torch.promote_types(local.dtype, torch.float32)


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    """Reduces a tensor over the group in place; does nothing if the group is this rank alone."""
    # one rank makes no call: a collective over itself still costs a launch
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
