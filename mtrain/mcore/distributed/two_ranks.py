"""All-gathers and reduce-scatters of two ranks on CPUs.

gloo sends them around a ring of two in small pieces. Two ranks that swap their halves in one message each do the same
for a fraction of the processor time (`tools/bench/peers/pretrain.py --tp 2` measures a step), and with the same bits,
as a sum of two numbers does not depend on the order. Other groups keep gloo's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

Kind = Literal["all-gather", "reduce-scatter"]

_in_the_place_of: list[Kind] = []
"""What the message that is being sent stands for."""


def in_the_place_of() -> Kind | None:
    """The collective of which this thread is sending a message; None of a message that is none."""
    return _in_the_place_of[-1] if _in_the_place_of else None


def install() -> None:
    """Puts them in the place of torch's, also where megatron-core has the names already; for CPUs alone."""
    import megatron.core.tensor_parallel.layers as layers
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.utils as utils

    torchs: Any = dist
    torchs.all_gather_into_tensor = _gather(dist.all_gather_into_tensor)
    torchs.reduce_scatter_tensor = _scatter(dist.reduce_scatter_tensor)
    module: Any
    for module in (layers, mappings, utils):  # all ranks: one that swaps would wait for ever for one that does not
        module.dist_all_gather_func = dist.all_gather_into_tensor
    for module in (layers, mappings):
        module.dist_reduce_scatter_func = dist.reduce_scatter_tensor


class _SwappedHalves:
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


def _is_for_two(tensor: Tensor, group: Any) -> bool:
    """Whether this call is swapped; the same on both ranks."""
    return (
        tensor.device.type == "cpu"
        and dist.get_world_size(group) == 2
        # calls that are collected are made at once later, and torch.compile knows torch's own
        and (group or dist.group.WORLD) not in _world.pg_coalesce_state
        and not torch.compiler.is_compiling()
    )


def _begun(swap: _SwappedHalves, async_op: bool) -> _SwappedHalves | None:
    if async_op:
        return swap
    swap.wait()
    return None


def _gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather_into_tensor(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not (_is_for_two(tensor, group) and output.is_contiguous() and output.numel() == 2 * tensor.numel()):
            return original(output, tensor, group, async_op)
        rank, halves = dist.get_rank(group), output.detach().view(2, -1)
        own = tensor.detach().contiguous().view(-1)
        halves[rank].copy_(own)
        return _begun(_SwappedHalves("all-gather", own, halves[1 - rank], group, lambda: None), async_op)

    return all_gather_into_tensor


def _scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter_tensor(
        output: Tensor, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        fits = tensor.is_contiguous() and output.is_contiguous() and tensor.numel() == 2 * output.numel()
        if not (_is_for_two(tensor, group) and op == dist.ReduceOp.SUM and fits):
            return original(output, tensor, op, group, async_op)
        rank, halves = dist.get_rank(group), tensor.detach().view(2, -1)
        received = torch.empty_like(halves[rank])

        def add() -> None:
            torch.add(halves[rank], received, out=output.detach().view(-1))

        return _begun(_SwappedHalves("reduce-scatter", halves[1 - rank], received, group, add), async_op)

    return reduce_scatter_tensor
