"""Collectives on CPUs: those that gloo lacks, and those of two ranks.

gloo sends all-gathers and reduce-scatters around a ring of two in small pieces. Two ranks that swap their halves in one
message each need a fraction of the processor time (`tools/bench/peers/pretrain.py --layout tp2sp`) and get the same
bits. Other groups keep gloo's.

megatron-core gathers and scatters lists of tensors of several sizes if experts are divided over etp > 1
(tensor_parallel/mappings.py). gloo refuses them, but its all-to-all takes any sizes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Kind = Literal["all-gather", "reduce-scatter"]

_in_the_place_of: list[Kind] = []
"""Kinds of the collectives for which a message is being sent."""


def in_the_place_of() -> Kind | None:
    """Returns the collective whose message is being sent now, if any."""
    return _in_the_place_of[-1] if _in_the_place_of else None


def install() -> None:
    """Replaces the collectives that megatron-core calls by these; on every rank, for CPUs only. A user's program keeps
    torch's own of equal sizes, and so do gradient buffers, whose calls torch collects."""
    _install_unequal_sizes()
    import megatron.core.tensor_parallel.layers as layers
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.utils as utils

    # these modules bind torch's functions to names of their own
    module: Any
    for module in (layers, mappings, utils):
        module.dist_all_gather_func = all_gather_into_tensor
    for module in (layers, mappings):
        module.dist_reduce_scatter_func = reduce_scatter_tensor


class SwappedHalves:
    """A collective in progress, instead of torch's `Work`."""

    def __init__(self, kind: Kind, sent: Tensor, received: Tensor, group: Any, end: Callable[[], object]) -> None:
        """Sends a contiguous tensor, not to change before `wait`, to the other rank of a group of two; `end` is called
        when its message is in `received`."""
        other = 1 - dist.get_rank(group)
        _in_the_place_of.append(kind)
        try:
            # both are posted before either is awaited: two ranks that each wait for their send first could deadlock
            works = dist.isend(sent, group=group, group_dst=other), dist.irecv(received, group=group, group_src=other)
        finally:
            _in_the_place_of.pop()
        self._works, self._memory, self._end = works, (sent, received), end

    def wait(self) -> bool:
        """Waits until the result is there."""
        for work in self._works:
            assert work is not None, "this rank is in the group"
            work.wait()
        self._end()
        return True


def all_gather_into_tensor(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Does what `torch.distributed.all_gather_into_tensor` does."""
    if not _are_halves(output, tensor, group):
        return dist.all_gather_into_tensor(output, tensor, group, async_op)
    rank, halves, own = dist.get_rank(group), output.detach().view(2, -1), tensor.detach().view(-1)
    halves[rank].copy_(own)
    return _begun(SwappedHalves("all-gather", own, halves[1 - rank], group, lambda: None), async_op)


def reduce_scatter_tensor(
    output: Tensor, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Does what `torch.distributed.reduce_scatter_tensor` does."""
    if op != dist.ReduceOp.SUM or not _are_halves(tensor, output, group):
        return dist.reduce_scatter_tensor(output, tensor, op, group, async_op)
    rank, halves = dist.get_rank(group), tensor.detach().view(2, -1)
    received = torch.empty_like(halves[rank])

    def add() -> None:
        torch.add(halves[rank], received, out=output.detach().view(-1))

    return _begun(SwappedHalves("reduce-scatter", halves[1 - rank], received, group, add), async_op)


def _are_halves(whole: Tensor, half: Tensor, group: Any) -> bool:
    """Says whether this call can be swapped, the same on both ranks; torch reports what is wrong with others."""
    return (
        not torch.compiler.is_compiling()  # the compiler can trace torch's own
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


def _install_unequal_sizes() -> None:
    """Replaces torch's gathers and scatters of lists, which gloo refuses where sizes differ."""
    torchs: Any = dist
    torchs.all_gather, torchs.reduce_scatter = _gather(dist.all_gather), _scatter(dist.reduce_scatter)


def _gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(tensors: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        sizes = [len(part) for part in tensors]
        if len(set(sizes)) <= 1:
            return original(tensors, tensor, group, async_op)
        assert not async_op
        whole = tensor.new_empty(sum(sizes), *tensor.shape[1:])  # [rows of all ranks, ...]
        own = [len(tensor)] * len(sizes)
        dist.all_to_all_single(whole, torch.cat([tensor] * len(sizes)), sizes, own, group=group)
        for output, part in zip(tensors, torch.split(whole, sizes), strict=True):
            output.copy_(part)
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
        sizes = [len(part) for part in tensors]
        if len(set(sizes)) <= 1:
            return original(output, tensors, op, group, async_op)
        assert op == dist.ReduceOp.SUM, "only sums"
        assert not async_op
        parts = output.new_empty(len(sizes), *output.shape)  # [ranks, own rows, ...]
        own = [len(output)] * len(sizes)
        # flattening contiguous memory gives a view, through which the exchange fills `parts`
        dist.all_to_all_single(parts.flatten(0, 1), torch.cat(list(tensors)), own, sizes, group=group)
        output.copy_(parts.sum(0))  # the order of ranks: the same bits at every repetition
        return None

    return reduce_scatter
