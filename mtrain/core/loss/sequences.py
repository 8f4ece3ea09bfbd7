"""Sums over whole sequences, which may share rows and be spread over several context-parallel ranks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class PackedSequences:
    """Sequences of a microbatch whose rows may hold several."""

    ids: Tensor
    """Sequence of each token of this rank, [batch, seq] int64, counted from 0 in the microbatch."""
    num_sequences: int
    """Number of sequences of the whole microbatch, the same on all ranks."""


def sum_by_sequence(values: Tensor, packed: PackedSequences) -> Tensor:
    """Sums values over this rank's tokens of each sequence, [batch, seq] -> [num_sequences]; differentiable."""
    # index_add and scatter_add add in any order on a GPU, but a run has to repeat to the bit
    return values.new_zeros(packed.num_sequences).index_put((packed.ids,), values, accumulate=True)


@dataclass(frozen=True)
class TokenSources:
    """Sources of a blend that the tokens of a microbatch come from."""

    ids: Tensor
    """Index of each token's source, [batch, seq] int64; -1 where it is not known."""
    num_sources: int


def sum_by_source(values: Tensor, sources: TokenSources) -> Tensor:
    """Sums values over this rank's tokens of each source, [batch, seq] -> [num_sources] float64, without a graph."""
    # a matrix product: atomic adds are slow on a GPU, and their order is not fixed
    is_of = sources.ids.reshape(-1, 1) == torch.arange(sources.num_sources, device=values.device)
    return values.detach().reshape(-1).double() @ is_of.double()


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the sum of every rank's values, on every rank; differentiable. None: there is one rank.

    One all-reduce over the group, and one in backward, in the same order on all ranks.
    """
    if group is None:
        return values
    return _SumOverRanks.apply(values, group)  # type: ignore[no-untyped-call]


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks whose backward is the same sum: each rank differentiates its own part N_r of the numerator, and
    the summand x_s of rank s reaches all of them through the sum S, so dN / dx_s is the sum over r of dN_r / dS."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        # the gradient of a sum is expanded (stride 0), which no collective can write to
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
