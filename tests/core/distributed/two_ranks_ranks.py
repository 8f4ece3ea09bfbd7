"""The rank side of test_two_ranks.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtrain.core.ranks.cpu_collectives import all_gather_into_tensor, emulated_collective, reduce_scatter_tensor
from mtrain.core.ranks.groups import Groups


class Operations(TorchDispatchMode):
    """Records the calls that reach torch.distributed's backend inside the block, and the operations they stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[tuple[str, str | None]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        namespace, name = function.name().split(".")[0].split("::")
        if namespace == "c10d" and name != "recv_":
            self.names.append((name, emulated_collective()))
        return function(*args, **(kwargs or {}))


class Found(NamedTuple):
    """Results of one rank."""

    gathered: list[float]
    scattered: list[float]
    names: list[tuple[str, str | None]]


def own(rank: int, dtype: torch.dtype, rows: int) -> Tensor:
    """Builds [rows, 3] numbers that differ by rank and place, and do not add exactly in half precision."""
    return (torch.arange(3 * rows).view(rows, 3) * 1.37 + 100.21 * rank).to(dtype)


def both(groups: Groups, dtype: torch.dtype, in_place: bool, async_op: bool) -> Found:
    """Starts an all-gather and a reduce-scatter over the world, one after the other."""
    size, rank = dist.get_world_size(), groups.rank
    whole, part = torch.empty(2 * size, 3, dtype=dtype), own(rank, dtype, 2)
    summands = own(rank, dtype, 2 * size)
    total = torch.empty(2, 3, dtype=dtype)
    if in_place:  # as megatron-core's buffers are: the rank's part is a view of the whole
        whole[2 * rank : 2 * rank + 2] = part
        part, total = whole[2 * rank : 2 * rank + 2], summands[2 * rank : 2 * rank + 2]
    with Operations() as operations:
        works = [
            all_gather_into_tensor(whole, part, async_op=async_op),
            reduce_scatter_tensor(total, summands, async_op=async_op),
        ]
        for work in works:
            assert (work is not None) == async_op
            if work is not None:
                work.wait()
    return Found(whole.flatten().tolist(), total.flatten().tolist(), operations.names)


def maxima(groups: Groups) -> list[float]:
    """Runs a reduction that is not a sum; torch's own does it."""
    largest = torch.empty(1)
    reduce_scatter_tensor(largest, torch.tensor([3.0, -1.0]) * (1 - 2 * groups.rank), op=dist.ReduceOp.MAX)
    return largest.tolist()


def nothing(groups: Groups) -> list[int]:
    """Sends tensors without elements, like those of experts without tokens."""
    empty = torch.empty(0, 4)
    all_gather_into_tensor(empty, empty)
    reduce_scatter_tensor(empty, empty)
    return list(empty.shape)


def of_megatron(groups: Groups) -> list[tuple[str, str | None]]:
    """Returns what a gather and a scatter along the sequence send."""
    operations = Operations()
    with operations:
        whole = gather_from_sequence_parallel_region(torch.ones(2, 3), group=groups.tp)
        reduce_scatter_to_sequence_parallel_region(whole, group=groups.tp)
    return operations.names
