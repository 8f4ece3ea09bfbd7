"""All-gathers and reduce-scatters of two ranks on CPUs.

gloo sends them around a ring of two in small pieces. Two ranks that swap their halves in one message each do the same
for a fraction of the processor time (`tools/bench/peers/pretrain.py --layout tp2sp` measures a step), and with the same
bits, as a sum of two numbers does not depend on the order. Other groups keep gloo's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Kind = Literal["all-gather", "reduce-scatter"]

_in_the_place_of: list[Kind] = []
"""What the message that is being sent stands for."""


def in_the_place_of() -> Kind | None:
    """The collective whose message is being sent now; None of a message that is none."""
    return _in_the_place_of[-1] if _in_the_place_of else None


def install() -> None:
    """Puts them in the place of those that megatron-core's tensor parallelism calls; for CPUs alone.

    Every rank has to: one that swaps would wait for ever for one that does not. A user's program, and gradient buffers,
    whose calls torch collects, keep torch's own.
    """
    import megatron.core.tensor_parallel.layers as layers
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.utils as utils

    # where they are used: these modules bind torch's functions to names of their own
    module: Any
    for module in (layers, mappings, utils):
        module.dist_all_gather_func = all_gather_into_tensor
    for module in (layers, mappings):
        module.dist_reduce_scatter_func = reduce_scatter_tensor


class SwappedHalves:
    """A collective that has begun; stands where torch's `Work` does."""

    def __init__(self, kind: Kind, sent: Tensor, received: Tensor, group: Any, end: Callable[[], object]) -> None:
        """
        Args:
            kind: What it is.
            sent: Contiguous, not to change before `wait`.
            received: Contiguous memory for what the other rank sends.
            group: Of two ranks.
            end: What remains to be done when it is there.
        """
        other = 1 - dist.get_rank(group)
        _in_the_place_of.append(kind)
        try:
            # both are posted before either is awaited: two ranks that each wait for their send first could deadlock
            works = dist.isend(sent, group=group, group_dst=other), dist.irecv(received, group=group, group_src=other)
        finally:
            _in_the_place_of.pop()
        self._works, self._memory, self._end = works, (sent, received), end

    def wait(self) -> bool:
        """Until the result is there."""
        for work in self._works:
            assert work is not None, "this rank is in the group"
            work.wait()
        self._end()
        return True


def all_gather_into_tensor(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """As `torch.distributed.all_gather_into_tensor`."""
    if not _are_halves(output, tensor, group):
        return dist.all_gather_into_tensor(output, tensor, group, async_op)
    rank, halves, own = dist.get_rank(group), output.detach().view(2, -1), tensor.detach().view(-1)
    halves[rank].copy_(own)
    return _begun(SwappedHalves("all-gather", own, halves[1 - rank], group, lambda: None), async_op)


def reduce_scatter_tensor(
    output: Tensor, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """As `torch.distributed.reduce_scatter_tensor`."""
    if op != dist.ReduceOp.SUM or not _are_halves(tensor, output, group):
        return dist.reduce_scatter_tensor(output, tensor, op, group, async_op)
    rank, halves = dist.get_rank(group), tensor.detach().view(2, -1)
    received = torch.empty_like(halves[rank])

    def add() -> None:
        torch.add(halves[rank], received, out=output.detach().view(-1))

    return _begun(SwappedHalves("reduce-scatter", halves[1 - rank], received, group, add), async_op)


def _are_halves(whole: Tensor, half: Tensor, group: Any) -> bool:
    """Whether this call can be swapped, the same on both ranks; torch says what is wrong with those that cannot."""
    return (
        not torch.compiler.is_compiling()  # torch's own it can trace
        and whole.device.type == half.device.type == "cpu"
        and dist.get_world_size(group) == 2
        and whole.dtype == half.dtype
        and whole.is_contiguous()
        and half.is_contiguous()
        and whole.numel() == 2 * half.numel() > 0
    )


def _begun(swap: SwappedHalves, async_op: bool) -> SwappedHalves | None:
    if async_op:
        return swap
    swap.wait()
    return None
