"""Rank side of the check of collectives: compares each with the result that the host computes from all operands.

Operands are whole numbers small enough for every partial sum to be exact in each format, so any order of adding gives
the same bits. No operand is 0, so a lost element is seen.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal, assert_never

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mtrain.core.ranks import cpu_collectives
from mtrain.core.ranks.groups import Groups
from mtrain.plan.search.hardware import Collective
from mtrain.verify.core.result import Deviation
from mtrain.verify.planted.faults import spoil

MAX_RANKS = 16
_LARGEST = 8
"""Largest absolute operand: 16 ranks add up to 128, and bfloat16 holds all whole numbers up to 256."""
_SEED = 1234
_HALVES = ("float32", "bfloat16", "float16")

AnyCollective = Collective | Literal["broadcast", "all_reduce_max"]
DTYPES: dict[AnyCollective, tuple[str, ...]] = {
    "all_reduce": (*_HALVES, "float64", "int64"),
    "all_reduce_max": ("float32", "float64"),
    "reduce_scatter": _HALVES,
    "all_gather": (*_HALVES, "int64"),
    "all_to_all": (*_HALVES, "int64"),
    "send_recv": _HALVES,
    "broadcast": (*_HALVES, "float64", "int64"),
}
"""Formats in which a run uses each collective."""
GROUPS = ("world", "tp", "cp", "pp", "dp_cp", "tp_dp_cp", "ep", "expt_dp")
"""Groups of a run: the world, and fields of megatron-core's ProcessGroupCollection."""

Worst = tuple[float, int]
"""Largest share of elements that differ, and the size at which they do: elements of an operand or of its part."""
Splits = tuple[list[int], list[int]]
"""Numbers of elements that a rank receives from and sends to each rank of a group."""


@cache
def operand(rank: int, size: int) -> NDArray[np.int16]:
    """Returns the operand of a rank, [size], without zeros."""
    drawn = np.random.default_rng([_SEED, rank, size]).integers(-_LARGEST, _LARGEST, size, np.int16)
    return np.where(drawn >= 0, drawn + np.int16(1), drawn)


def check_collectives(groups: Groups, sizes: Sequence[int], fault: str | None) -> dict[str, Worst]:
    """Runs every collective over every group of more than one rank; returns results such as `all_reduce of bfloat16
    over tp`."""
    results: dict[str, Worst] = {}
    for kind in GROUPS:
        group = dist.group.WORLD if kind == "world" else getattr(groups.collection, kind)
        if dist.get_world_size(group) == 1:
            continue
        for collective, dtypes in DTYPES.items():
            for dtype in dtypes:
                shares = [(_share(collective, group, size, dtype, groups.device, fault), size) for size in sizes]
                results[f"{collective} of {dtype} over {kind}"] = max(shares)
    return results


def _share(
    collective: AnyCollective, group: Any, size: int, dtype: str, device: torch.device, fault: str | None
) -> float:
    ranks, local_rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    operand_values, expected, splits = _case(collective, ranks, local_rank, size)
    # a copy: a collective may write into it
    tensor = torch.from_numpy(operand_values).to(device, getattr(torch, dtype), copy=True)
    output = run(collective, tensor, group, splits)
    spoil(fault, collective, local_rank == len(ranks) - 1, output)
    return float(np.mean(output.to("cpu", torch.float64).numpy() != expected))


def _case(
    collective: AnyCollective, ranks: Sequence[int], local_rank: int, size: int
) -> tuple[NDArray[np.int16], NDArray[np.int16], Splits | None]:
    """Returns the input of a collective on the rank with index `local_rank` and the output it must get, both [n]."""
    count = len(ranks)
    operands = [operand(rank, count * size if collective == "reduce_scatter" else size) for rank in ranks]
    match collective:
        case "all_reduce":
            return operands[local_rank], np.stack(operands).sum(axis=0, dtype=np.int16), None
        case "all_reduce_max":
            return operands[local_rank], np.stack(operands).max(axis=0), None
        case "reduce_scatter":
            total = np.stack(operands).sum(axis=0, dtype=np.int16)
            return operands[local_rank], total[local_rank * size : (local_rank + 1) * size], None
        case "all_gather":
            return operands[local_rank], np.concatenate(operands), None
        case "all_to_all":
            # counts differ from pair to pair, and some are 0
            counts = [[size * ((source + 2 * target) % 3) for target in range(count)] for source in range(count)]
            operands = [operand(rank, sum(row)) for rank, row in zip(ranks, counts, strict=True)]
            parts = [np.split(whole, np.cumsum(row))[local_rank] for whole, row in zip(operands, counts, strict=True)]
            splits = [row[local_rank] for row in counts], counts[local_rank]
            return operands[local_rank], np.concatenate(parts), splits
        case "send_recv":
            return operands[local_rank], operands[local_rank - 1], None
        case "broadcast":
            return operands[local_rank], operands[-1], None
        case _:
            assert_never(collective)


def run(collective: AnyCollective, tensor: Tensor, group: Any, splits: Splits | None = None) -> Tensor:
    """Runs a collective as a training run does and returns its output; it may change `tensor`, [n] on the device."""
    # on CPUs megatron-core gets our own functions
    functions: Any = cpu_collectives if tensor.device.type == "cpu" else dist
    ranks, local_rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    output = tensor
    match collective:
        case "all_reduce":
            dist.all_reduce(output, group=group)
        case "all_reduce_max":
            dist.all_reduce(output, dist.ReduceOp.MAX, group=group)
        case "reduce_scatter":
            output = tensor.new_empty(len(tensor) // len(ranks))
            functions.reduce_scatter_tensor(output, tensor, group=group)
        case "all_gather":
            output = tensor.new_empty(len(tensor) * len(ranks))
            functions.all_gather_into_tensor(output, tensor, group=group)
        case "all_to_all":
            received, sent = (None, None) if splits is None else splits
            output = tensor.new_empty(len(tensor) if received is None else sum(received))
            dist.all_to_all_single(output, tensor, received, sent, group=group)
        case "send_recv":
            output = torch.empty_like(tensor)
            after, before = ranks[(local_rank + 1) % len(ranks)], ranks[local_rank - 1]
            exchange([dist.P2POp(dist.isend, tensor, after, group), dist.P2POp(dist.irecv, output, before, group)])
        case "broadcast":
            dist.broadcast(output, ranks[-1], group=group)
        case _:
            assert_never(collective)
    return output


def exchange(messages: list[dist.P2POp]) -> None:
    """Sends and receives messages, and waits for them."""
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def collective_deviations(ranks: Sequence[dict[str, Worst]]) -> Iterator[Deviation]:
    """Yields the worst rank's deviation of each collective over each kind of group."""
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        (share, size), rank = max((results[name], number) for number, results in enumerate(ranks) if name in results)
        where = f" (rank {rank}, operands of {size} elements)" if share > 0 else ""
        yield Deviation("collective", f"{name}{where}", 1, share, 0.0)
