"""Ring attention: keys and values are passed around the context-parallel ranks while each attends to those it has.

A rank holds chunks r and 2 cp - 1 - r of a row (zigzag). Of the keys of its own chunks it sees those before each query;
of an earlier rank's keys the early chunk, with all of its queries; of a later rank's keys both chunks, with the queries
of its late chunk alone. So every hop costs equally many pairs, and no kernel needs a mask. The next hop is sent while
the current one is computed. Outputs are combined by the log-sum-exp of their scores, in float32 at least.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023; zigzag as in Llama 3 (2024), 3.3.2."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, assert_never

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_ALIGNED = 8
"""Multiple to which head sizes are padded on GPUs; zeros change no score."""
_FLASH_LARGEST = 256
"""Largest head size of flash attention."""

Kernel = Literal["cpu", "flash", "efficient"]


class AttendedPart(NamedTuple):
    """Attention to some of the keys."""

    output: Tensor
    """[batch, heads, queries, dim]."""
    exponents: Tensor
    """[batch, heads, queries] log of the sum of exp(scores); float32, or the queries' dtype if that is wider."""


def kernel_of(query: Tensor) -> Kernel:
    """Returns the kernel that takes these queries."""
    if query.device.type == "cpu":
        return "cpu"
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return "flash" if is_half and query.shape[-1] <= _FLASH_LARGEST else "efficient"


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> AttendedPart:
    """Attends with all queries, [batch, heads, queries, dim], to all keys, [batch, groups, keys, dim], or causally
    where there are as many. Groups divide the heads."""
    kernel, dim = kernel_of(query), query.shape[-1]
    query, key, value = _prepared(kernel, query, key, value)
    aten: Any = torch.ops.aten
    match kernel:
        case "cpu":
            found = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
        case "flash":
            found = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
        case "efficient":
            given = (query, key, value, None)
            found = aten._scaled_dot_product_efficient_attention(*given, True, 0.0, is_causal, scale=scale)
        case _:
            assert_never(kernel)
    # the efficient kernel pads the last axis
    return AttendedPart(found[0][..., :dim], found[1][..., : query.shape[2]])


def attend_backward(
    gradient: Tensor, given: tuple[Tensor, Tensor, Tensor], found: AttendedPart, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of queries, keys and values, those of keys and values summed over the heads that share
    them.

    `given` are these three. `found` is the attention to ALL keys, of which these may be a part: their share of it
    follows. All other arguments are those of `attend`.
    """
    kernel, dim, groups = kernel_of(given[0]), given[0].shape[-1], given[1].shape[1]
    query, key, value = _prepared(kernel, *given)
    gradient, output = (_padded(kernel, part) for part in (gradient, found.output))
    aten: Any = torch.ops.aten
    exponents = found.exponents.contiguous()
    parts: tuple[Any, ...] = (gradient, query, key, value)
    match kernel:
        case "cpu":
            function = aten._scaled_dot_product_flash_attention_for_cpu_backward
            gradients = function(*parts, output, exponents, 0.0, is_causal, scale=scale)
        case "flash":
            function = aten._scaled_dot_product_flash_attention_backward
            lengths = (None, None, query.shape[2], key.shape[2])  # no ends of sequences with different lengths
            states = torch.empty(2, dtype=torch.int64, device=query.device).view(torch.uint64)  # states of dropout
            parts = (*parts, output, exponents, *lengths, 0.0, is_causal, states, torch.empty_like(states[:0]))
            gradients = function(*parts, scale=scale)
        case "efficient":
            function = aten._scaled_dot_product_efficient_attention_backward
            exponents = functional.pad(exponents, (0, -exponents.shape[-1] % 32), value=float("inf"))
            state = torch.empty((), dtype=torch.int64, device=query.device)
            wanted = [True, True, True, False]
            parts = (*parts, None, output, exponents, state, state, 0.0, wanted, is_causal)
            gradients = function(*parts, scale=scale)
        case _:
            assert_never(kernel)
    of_query, of_key, of_value = (part[..., :dim] for part in gradients[:3])
    return of_query, _summed(of_key, groups), _summed(of_value, groups)


def _prepared(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repeats key and value heads where the kernel does not support groups, and pads head sizes."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and kernel != "flash":
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    return _padded(kernel, query), _padded(kernel, key), _padded(kernel, value)


def _padded(kernel: Kernel, part: Tensor) -> Tensor:
    missing = 0 if kernel == "cpu" else -part.shape[-1] % _ALIGNED
    return functional.pad(part, (0, missing)) if missing else part


def _summed(part: Tensor, groups: int) -> Tensor:
    """Sums [batch, heads, ...] -> [batch, groups, ...]."""
    batch, heads, *rest = part.shape
    return part if heads == groups else part.reshape(batch, groups, heads // groups, *rest).sum(2)


class Visible(NamedTuple):
    """The queries of a rank, from `query_start` on, that see keys of one rank, up to `key_end`."""

    query_start: int
    key_end: int
    is_causal: bool


def visible(rank: int, holder: int, length: int) -> Visible:
    """Returns which keys of `holder` the queries of `rank` see; each has two chunks, `length` positions."""
    if rank == holder:
        return Visible(0, length, is_causal=True)
    return Visible(0, length // 2, False) if holder < rank else Visible(length // 2, length, False)


def ring_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, group: dist.ProcessGroup) -> Tensor:
    """Attends causally in rows that are zigzagged over a context-parallel group, [seq_local, batch, heads, dim].

    Costs cp - 1 hops of keys and values forward; in backward these again, and cp hops of their gradients.
    """
    # [batch, heads, seq_local, dim], the form of kernels
    parts = [part.permute(1, 2, 0, 3) for part in (query, key, value)]
    output: Tensor = _RingAttention.apply(*parts, scale, group)  # type: ignore[no-untyped-call]
    return output.permute(2, 0, 1, 3)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, group: dist.ProcessGroup) -> Tensor:
        rank, length = group.rank(), query.shape[2]
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros(query.shape, dtype=wide, device=query.device)
        exponents = torch.full(query.shape[:3], float("-inf"), dtype=wide, device=query.device)
        for holder, held in _hops(torch.stack((key, value)), group):
            start, end, is_causal = visible(rank, holder, length)
            found = attend(query[:, :, start:], held[0][:, :, :end], held[1][:, :, :end], scale, is_causal)
            _merge(output[:, :, start:], exponents[:, :, start:], found)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, exponents)
        ctx.scale, ctx.group = scale, group
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, exponents = ctx.saved_tensors
        rank, length = ctx.group.rank(), query.shape[2]
        wide = torch.promote_types(query.dtype, torch.float32)
        of_query = torch.zeros(query.shape, dtype=wide, device=query.device)
        # sent after the keys and values that it belongs to, one hop later, and one further: back to their rank
        of_held = torch.zeros((2, *key.shape), dtype=wide, device=key.device)
        arriving = None
        for holder, held in _hops(torch.stack((key, value)), ctx.group):
            start, end, is_causal = visible(rank, holder, length)
            found = AttendedPart(output[:, :, start:], exponents[:, :, start:])
            given = query[:, :, start:], held[0][:, :, :end], held[1][:, :, :end]
            of_part = attend_backward(gradient[:, :, start:], given, found, ctx.scale, is_causal)
            of_query[:, :, start:] += of_part[0]
            if arriving is not None:
                of_held = arriving.wait()
            of_held[0, :, :, :end] += of_part[1]
            of_held[1, :, :, :end] += of_part[2]
            arriving = _Hop(of_held, ctx.group)
        assert arriving is not None
        of_key, of_value = arriving.wait().to(key.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None


def _merge(output: Tensor, exponents: Tensor, found: AttendedPart) -> None:
    """Merges attention to further keys, in place; `exponents` are the log-sum-exps of the scores."""
    together = torch.logaddexp(exponents, found.exponents)
    output *= (exponents - together).exp().unsqueeze(-1)
    output += found.output * (found.exponents - together).exp().unsqueeze(-1)
    exponents.copy_(together)


def _hops(own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yields keys and values of all ranks with the rank that holds them, this one's own first."""
    rank, size = group.rank(), group.size()
    held = own
    for hop in range(size):
        # begun before the caller computes with the current one
        arriving = _Hop(held, group) if hop + 1 < size else None
        yield (rank - hop) % size, held
        if arriving is not None:
            held = arriving.wait()


class _Hop:
    """A tensor on its way to the next rank, and that of the previous one on its way here."""

    def __init__(self, leaving: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        to, source = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self._leaving = leaving.contiguous()
        self._arriving = torch.empty_like(self._leaving)
        sends = dist.P2POp(dist.isend, self._leaving, to, group)
        receives = dist.P2POp(dist.irecv, self._arriving, source, group)
        # together, as NCCL needs it: one by one each rank would wait for the other to receive
        self._works = dist.batch_isend_irecv([sends, receives])

    def wait(self) -> Tensor:
        """Returns what has arrived; on a GPU the stream waits, not the host."""
        for work in self._works:
            work.wait()
        return self._arriving
