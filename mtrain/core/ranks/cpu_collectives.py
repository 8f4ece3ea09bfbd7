"""Collectives on CPUs that gloo lacks, and faster ones for groups of two ranks.

gloo sends all-gathers and reduce-scatters of two ranks around a ring in small pieces. Swapping halves in one message
each takes a fraction of the processor time (`tools/bench/peers/pretrain.py --layout tp2sp`) and gives the same bits.
Larger groups keep gloo's collectives.

megatron-core gathers and scatters lists of tensors of different sizes if etp > 1 divides experts
(tensor_parallel/mappings.py). gloo refuses them, but its all-to-all accepts any sizes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Kind = Literal["all-gather", "reduce-scatter"]

_emulated: list[Kind] = []
"""Collectives that are being emulated by messages now, innermost last."""


def emulated_collective() -> Kind | None:
    """Returns the collective that the message being sent now belongs to; None outside one."""
    return _emulated[-1] if _emulated else None


def install() -> None:
    """Makes megatron-core call the collectives of this module; must run on every rank, and only on CPUs.

    Calls from a user's program, and from gradient buffers, which torch coalesces, keep torch's collectives of equal
    sizes.
    """
    _install_unequal_sizes()
    import megatron.core.tensor_parallel.layers as layers
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.utils as utils

    # these modules call torch's functions by names of their own
    module: Any
    for module in (layers, mappings, utils):
        module.dist_all_gather_func = all_gather_into_tensor
    for module in (layers, mappings):
        module.dist_reduce_scatter_func = reduce_scatter_tensor


class SwappedHalves:
    """A collective in progress; replaces torch's `Work`."""

    def __init__(self, kind: Kind, sent: Tensor, received: Tensor, group: Any, end: Callable[[], object]) -> None:
        """Sends a contiguous tensor, which must not change before `wait`, to the other rank of a group of two; calls
        `end` when the message of that rank is in `received`."""
        other = 1 - dist.get_rank(group)
        _emulated.append(kind)
        try:
            # both are posted before either is awaited, since two ranks that first wait for their sends could deadlock
            works = dist.isend(sent, group=group, group_dst=other), dist.irecv(received, group=group, group_src=other)
        finally:
            _emulated.pop()
        self._works, self._memory, self._end = works, (sent, received), end

    def wait(self) -> bool:
        """Waits for the result."""
        for work in self._works:
            assert work is not None, "this rank is in the group"
            work.wait()
        self._end()
        return True


def all_gather_into_tensor(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Replaces `torch.distributed.all_gather_into_tensor`."""
    if not _are_halves(output, tensor, group):
        return dist.all_gather_into_tensor(output, tensor, group, async_op)
    rank, halves, local_half = dist.get_rank(group), output.detach().view(2, -1), tensor.detach().view(-1)
    halves[rank].copy_(local_half)
    return _begun(SwappedHalves("all-gather", local_half, halves[1 - rank], group, lambda: None), async_op)


def reduce_scatter_tensor(
    output: Tensor, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Replaces `torch.distributed.reduce_scatter_tensor`."""
    if op != dist.ReduceOp.SUM or not _are_halves(tensor, output, group):
        return dist.reduce_scatter_tensor(output, tensor, op, group, async_op)
    rank, halves = dist.get_rank(group), tensor.detach().view(2, -1)
    received = torch.empty_like(halves[rank])

    def add() -> None:
        torch.add(halves[rank], received, out=output.detach().view(-1))

    return _begun(SwappedHalves("reduce-scatter", halves[1 - rank], received, group, add), async_op)


def _are_halves(whole: Tensor, half: Tensor, group: Any) -> bool:
    """Says, alike on both ranks, whether a call can swap halves; torch handles, or refuses, all others."""
    return (
        not torch.compiler.is_compiling()  # the compiler can trace only torch's functions
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
    """Replaces torch's gathers and scatters of lists, which gloo refuses if sizes differ."""
    torchs: Any = dist
    torchs.all_gather, torchs.reduce_scatter = _gather(dist.all_gather), _scatter(dist.reduce_scatter)


def _gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(tensors: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        sizes = [len(part) for part in tensors]
        if len(set(sizes)) <= 1:
            return original(tensors, tensor, group, async_op)
        assert not async_op
        whole = tensor.new_empty(sum(sizes), *tensor.shape[1:])  # [rows of all ranks, ...]
        local_sizes = [len(tensor)] * len(sizes)
        dist.all_to_all_single(whole, torch.cat([tensor] * len(sizes)), sizes, local_sizes, group=group)
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
        local_sizes = [len(output)] * len(sizes)
        # flattening contiguous memory gives a view, so the exchange fills `parts`
        dist.all_to_all_single(parts.flatten(0, 1), torch.cat(list(tensors)), local_sizes, sizes, group=group)
        output.copy_(parts.sum(0))  # in the order of ranks, so that repetitions give the same bits
        return None

    return reduce_scatter
