"""The softmax of a split vocabulary before its division, and what every loss of it needs.

The exponentials of a rank's columns are computed once, kept once in full precision, and shared by the losses of a
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
"""Of a temporary: 64 MiB in float32."""


@dataclass(frozen=True)
class Exponentials:
    """The only [seq, batch, vocab_local] tensor that is kept for backward."""

    values: Tensor
    """[seq, batch, vocab_local] exp(logit - maximum); 0 at padding."""
    maximum: Tensor
    """[seq, batch] over the whole vocabulary."""
    total: Tensor
    """[seq, batch]: sum of the values over the whole vocabulary."""
    num_real: int
    """Local columns that are not padding."""


def shifted_logits(local: Tensor, maximum: Tensor, num_real: int) -> Tensor:
    """Logits minus their token's maximum, in the maximum's dtype; -inf at padding.

    Args:
        local: [..., vocab_local].
        maximum: [...].
        num_real: Local columns that are not padding.
    """
    # bf16 - float32 is float32, on GPUs in one kernel; local.float() first would be one more copy of the logits
    shifted = torch.sub(local.detach(), maximum.unsqueeze(-1))
    # exp(-inf) is exactly 0, so padding is in no sum, whatever its logits hold
    shifted[..., num_real:] = float("-inf")
    return shifted


def local_maximum(local: Tensor, num_real: int) -> Tensor:
    """[seq, batch] each token's largest real logit on this rank; -inf where the rank holds padding alone."""
    real = local.detach()[..., :num_real]
    dtype = compute_dtype(local)
    # a tensor-parallel rank can hold padding alone, and amax of no column raises
    if num_real == 0:
        return torch.full(real.shape[:-1], float("-inf"), dtype=dtype, device=real.device)
    # the maximum of bf16 numbers is one of them: exact, so the cast is of [seq, batch] numbers only
    return real.amax(-1).to(dtype)


def softmax_times(
    exponentials: Exponentials, scale: Tensor, is_masked: Tensor, dtype: torch.dtype, shift: Tensor | None = None
) -> Tensor:
    """Softmax x scale - shift in the logits' dtype, rounded once.

    Args:
        exponentials: Of the logits.
        scale: [seq, batch].
        is_masked: [seq, batch] bool: tokens that get exactly 0, though their logits may hold inf or nan.
        dtype: Of the result.
        shift: [seq, batch], subtracted at every real column.

    Returns:
        [seq, batch, vocab_local]; every padding column is exactly 0.
    """
    values, factor = exponentials.values, (scale / exponentials.total).unsqueeze(-1)
    # out= of a smaller dtype: formed in full precision and rounded as it is stored (CPUs use a temporary)
    gradient = torch.empty_like(values, dtype=dtype)
    if shift is None:
        torch.mul(values, factor, out=gradient)
    else:
        torch.addcmul(-shift.unsqueeze(-1), values, factor, out=gradient)
    return cleared(gradient, is_masked, exponentials.num_real)


def cleared(gradient: Tensor, is_masked: Tensor, num_real: int) -> Tensor:
    """The gradient with exact zeros at masked tokens and at padding, in place."""
    # filled, not multiplied by 0: at a masked token with inf logits the softmax is nan
    if gradient.device.type == "cpu":
        # Finds the rows first, for which a GPU would be waited for; few tokens or none. The boolean itself as an index
        # would be one more pass over all of them.
        gradient[is_masked.nonzero(as_tuple=True)] = 0.0
    else:
        gradient.masked_fill_(is_masked.unsqueeze(-1), 0.0)
    gradient[..., num_real:] = 0.0
    return gradient


def row_slices(local: Tensor) -> Iterator[slice]:
    """Yields runs of positions whose logits are few enough for a temporary."""
    # along positions, the outermost axis, so that each part is one contiguous stretch of the logits
    step = max(1, _ELEMENTS_AT_A_TIME // max(1, math.prod(local.shape[1:])))
    for start in range(0, local.shape[0], step):
        yield slice(start, start + step)


def compute_dtype(local: Tensor) -> torch.dtype:
    """float32, or float64 for float64 logits."""
    # float64 stays float64: the references of `mtrain verify` go through the same code
    return torch.promote_types(local.dtype, torch.float32)


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    """In place; nothing where the group is this rank alone."""
    # one rank makes no call: a collective over itself still costs a launch
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
