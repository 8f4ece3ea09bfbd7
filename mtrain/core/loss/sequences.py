"""Sums over whole sequences, which may share rows and may be split over context-parallel ranks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class PackedSequences:
    """Sequences of a microbatch with rows that may hold several of them."""

    ids: Tensor
    """Sequence number of each token of this rank, [batch, seq] int64, counted from 0 in the microbatch."""
    num_sequences: int
    """Number of sequences of the whole microbatch, the same on all ranks."""


def sum_by_sequence(values: Tensor, packed: PackedSequences) -> Tensor:
    """Sums values over this rank's tokens of each sequence, [batch, seq] -> [num_sequences]; differentiable."""
    # index_add and scatter_add have no fixed order on a GPU, but a run must repeat to the bit
    return values.new_zeros(packed.num_sequences).index_put((packed.ids,), values, accumulate=True)


@dataclass(frozen=True)
class TokenSources:
    """Sources of the tokens of a microbatch in a blend."""

    ids: Tensor
    """Index of each token's source, [batch, seq] int64; -1 if unknown."""
    num_sources: int


def sum_by_source(values: Tensor, sources: TokenSources) -> Tensor:
    """Sums values over this rank's tokens of each source, [batch, seq] -> [num_sources] float64, without a graph."""
    # a matrix product, since atomic adds are slow on a GPU and have no fixed order
    is_of = sources.ids.reshape(-1, 1) == torch.arange(sources.num_sources, device=values.device)
    return values.detach().reshape(-1).double() @ is_of.double()


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the sum of all ranks' values on every rank; differentiable. A group of None means this rank alone.

    One all-reduce over the group, and one in backward; all ranks must call it in the same order.
    """
    if group is None:
        return values
    return _SumOverRanks.apply(values, group)  # type: ignore[no-untyped-call]


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks, whose backward is the same sum.

    Rank r differentiates its own part N_r of the numerator, and every N_r depends on the summand x_s of rank s through
    the sum S. So dN / dx_s is the sum over r of dN_r / dS.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        # the gradient of a sum is an expanded tensor (stride 0), to which no collective can write
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
