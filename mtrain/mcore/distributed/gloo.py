"""Collectives that gloo lacks and experts need: on lists of tensors of several sizes.

megatron-core gathers and scatters such lists where experts are divided over etp > 1 (tensor_parallel/mappings.py). gloo
refuses them, but its all-to-all takes any sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def install() -> None:
    """Replaces torch's collectives by these; for machines without a GPU only."""
    torchs: Any = dist
    torchs.all_gather, torchs.reduce_scatter = _gather(dist.all_gather), _scatter(dist.reduce_scatter)


def _gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(tensors: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        sizes = [len(each) for each in tensors]
        # All ranks know all sizes, so all of them take the same branch.
        if len(set(sizes)) <= 1:
            return original(tensors, tensor, group, async_op)
        assert not async_op
        whole = tensor.new_empty(sum(sizes), *tensor.shape[1:])  # [rows of all ranks, ...]
        own = [len(tensor)] * len(sizes)
        # Each rank sends its rows to every rank, as one message a partner; the copies cost memory of ranks x own rows.
        dist.all_to_all_single(whole, torch.cat([tensor] * len(sizes)), sizes, own, group=group)
        for each, part in zip(tensors, torch.split(whole, sizes), strict=True):
            each.copy_(part)
        return None

    return all_gather


def _scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter(
        output: Tensor,
        tensors: Sequence[Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        sizes = [len(each) for each in tensors]
        if len(set(sizes)) <= 1:
            return original(output, tensors, op, group, async_op)
        # a caller that wants a maximum must not get a sum
        assert op == dist.ReduceOp.SUM, "only sums"
        assert not async_op
        parts = output.new_empty(len(sizes), *output.shape)  # [ranks, own rows, ...]
        own = [len(output)] * len(sizes)
        # flattening contiguous memory gives a view, through which the exchange fills `parts`
        dist.all_to_all_single(parts.flatten(0, 1), torch.cat(list(tensors)), own, sizes, group=group)
        output.copy_(parts.sum(0))  # the order of ranks: the same bits at every repetition
        return None

    return reduce_scatter
