"""Ring attention: context-parallel ranks pass keys and values around, and each attends to those it has.

Rank r holds chunks r and 2 cp - 1 - r of a row (zigzag). To the keys of its own chunks it attends causally. Of a lower
rank's keys, all its queries see the early chunk; of a higher rank's keys, only the queries of its late chunk see both
chunks. So every hop computes equally many pairs, and no kernel needs a mask. The next hop is sent while the current one
is computed. Outputs are combined by the log-sum-exp of their scores, in at least float32.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023; zigzag as in Llama 3 (2024), 3.3.2."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, assert_never

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_ALIGNED = 8
"""Head sizes are padded to a multiple of this on GPUs; zeros change no score."""
_FLASH_LARGEST = 256
"""Largest head size that flash attention supports."""

Kernel = Literal["cpu", "flash", "efficient"]


class AttendedPart(NamedTuple):
    """Result of attention to some of the keys."""

    output: Tensor
    """[batch, heads, queries, dim]."""
    exponents: Tensor
    """Log-sum-exp of the scores, [batch, heads, queries]; float32, or the dtype of the queries if that is wider."""


def kernel_of(query: Tensor) -> Kernel:
    """Returns the kernel that supports these queries."""
    if query.device.type == "cpu":
        return "cpu"
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return "flash" if is_half and query.shape[-1] <= _FLASH_LARGEST else "efficient"


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> AttendedPart:
    """Attends with queries, [batch, heads, queries, dim], to all keys, [batch, groups, keys, dim], or causally to
    equally many keys. The number of groups must divide the number of heads."""
    kernel, dim = kernel_of(query), query.shape[-1]
    query, key, value = _prepared(kernel, query, key, value)
    aten: Any = torch.ops.aten
    match kernel:
        case "cpu":
            result = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
        case "flash":
            result = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
        case "efficient":
            inputs = (query, key, value, None)
            result = aten._scaled_dot_product_efficient_attention(*inputs, True, 0.0, is_causal, scale=scale)
        case _:
            assert_never(kernel)
    # the efficient kernel pads the last axis
    return AttendedPart(result[0][..., :dim], result[1][..., : query.shape[2]])


def attend_backward(
    gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], attended: AttendedPart, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of queries, keys and values; those of keys and values are summed over the heads that share
    them.

    Args:
        inputs: Queries, keys and values, where the keys may be a part of all keys.
        attended: Attention to ALL keys, from which the share of these keys follows.
    """
    kernel, dim, groups = kernel_of(inputs[0]), inputs[0].shape[-1], inputs[1].shape[1]
    query, key, value = _prepared(kernel, *inputs)
    gradient, output = (_padded(kernel, part) for part in (gradient, attended.output))
    aten: Any = torch.ops.aten
    exponents = attended.exponents.contiguous()
    parts: tuple[Any, ...] = (gradient, query, key, value)
    match kernel:
        case "cpu":
            function = aten._scaled_dot_product_flash_attention_for_cpu_backward
            gradients = function(*parts, output, exponents, 0.0, is_causal, scale=scale)
        case "flash":
            function = aten._scaled_dot_product_flash_attention_backward
            lengths = (None, None, query.shape[2], key.shape[2])  # no sequences of different lengths
            states = torch.empty(2, dtype=torch.int64, device=query.device).view(torch.uint64)  # unused without dropout
            parts = (*parts, output, exponents, *lengths, 0.0, is_causal, states, torch.empty_like(states[:0]))
            gradients = function(*parts, scale=scale)
        case "efficient":
            function = aten._scaled_dot_product_efficient_attention_backward
            exponents = functional.pad(exponents, (0, -exponents.shape[-1] % 32), value=float("inf"))
            state = torch.empty((), dtype=torch.int64, device=query.device)
            needs_gradient = [True, True, True, False]
            parts = (*parts, None, output, exponents, state, state, 0.0, needs_gradient, is_causal)
            gradients = function(*parts, scale=scale)
        case _:
            assert_never(kernel)
    query_gradient, key_gradient, value_gradient = (part[..., :dim] for part in gradients[:3])
    return query_gradient, _summed(key_gradient, groups), _summed(value_gradient, groups)


def _prepared(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repeats key and value heads if the kernel does not support groups, and pads head sizes."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and kernel != "flash":
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    return _padded(kernel, query), _padded(kernel, key), _padded(kernel, value)


def _padded(kernel: Kernel, part: Tensor) -> Tensor:
    missing = 0 if kernel == "cpu" else -part.shape[-1] % _ALIGNED
    return functional.pad(part, (0, missing)) if missing else part


def _summed(part: Tensor, groups: int) -> Tensor:
    """Sums [batch, heads, ...] over the heads of each group, to [batch, groups, ...]."""
    batch, heads, *further = part.shape
    return part if heads == groups else part.reshape(batch, groups, heads // groups, *further).sum(2)


class Visible(NamedTuple):
    """Visibility between two ranks: queries from `query_start` on see keys before `key_end`."""

    query_start: int
    key_end: int
    is_causal: bool


def visible(rank: int, holder: int, length: int) -> Visible:
    """Returns which keys of `holder` the queries of `rank` see; each rank has `length` positions in two chunks."""
    if rank == holder:
        return Visible(0, length, is_causal=True)
    return Visible(0, length // 2, False) if holder < rank else Visible(length // 2, length, False)


def ring_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, group: dist.ProcessGroup) -> Tensor:
    """Attends causally in rows zigzagged over a context-parallel group, [seq_local, batch, heads, dim].

    Takes cp - 1 hops of keys and values in forward; the same in backward, and cp hops of their gradients.
    """
    # [batch, heads, seq_local, dim], as kernels expect
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
        for holder, key_value in _hops(torch.stack((key, value)), group):
            start, end, is_causal = visible(rank, holder, length)
            part = attend(query[:, :, start:], key_value[0][:, :, :end], key_value[1][:, :, :end], scale, is_causal)
            _merge(output[:, :, start:], exponents[:, :, start:], part)
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
        query_gradient = torch.zeros(query.shape, dtype=wide, device=query.device)
        # follows its keys and values one hop later, and makes one more hop, back to their rank
        key_value_gradient = torch.zeros((2, *key.shape), dtype=wide, device=key.device)
        arriving = None
        for holder, key_value in _hops(torch.stack((key, value)), ctx.group):
            start, end, is_causal = visible(rank, holder, length)
            attended = AttendedPart(output[:, :, start:], exponents[:, :, start:])
            inputs = query[:, :, start:], key_value[0][:, :, :end], key_value[1][:, :, :end]
            part_gradients = attend_backward(gradient[:, :, start:], inputs, attended, ctx.scale, is_causal)
            query_gradient[:, :, start:] += part_gradients[0]
            if arriving is not None:
                key_value_gradient = arriving.wait()
            key_value_gradient[0, :, :, :end] += part_gradients[1]
            key_value_gradient[1, :, :, :end] += part_gradients[2]
            arriving = _Hop(key_value_gradient, ctx.group)
        assert arriving is not None
        key_gradient, value_gradient = arriving.wait().to(key.dtype)
        return query_gradient.to(query.dtype), key_gradient, value_gradient, None, None


def _merge(output: Tensor, exponents: Tensor, part: AttendedPart) -> None:
    """Merges attention to further keys into `output` and `exponents` (log-sum-exp of the scores), in place."""
    merged = torch.logaddexp(exponents, part.exponents)
    output *= (exponents - merged).exp().unsqueeze(-1)
    output += part.output * (part.exponents - merged).exp().unsqueeze(-1)
    exponents.copy_(merged)


def _hops(local: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yields (rank, its keys and values) for all ranks, beginning with this one."""
    rank, size = group.rank(), group.size()
    current = local
    for hop in range(size):
        # starts the next hop before the caller computes with the current tensor
        arriving = _Hop(current, group) if hop + 1 < size else None
        yield (rank - hop) % size, current
        if arriving is not None:
            current = arriving.wait()


class _Hop:
    """A tensor on its way to the next rank, and the tensor of the previous rank on its way here."""

    def __init__(self, leaving: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        to, source = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self._leaving = leaving.contiguous()
        self._arriving = torch.empty_like(self._leaving)
        sends = dist.P2POp(dist.isend, self._leaving, to, group)
        receives = dist.P2POp(dist.irecv, self._arriving, source, group)
        # in one batch, since with NCCL each rank would otherwise wait for the other to receive
        self._works = dist.batch_isend_irecv([sends, receives])

    def wait(self) -> Tensor:
        """Returns the tensor of the previous rank; on a GPU the stream waits, not the host."""
        for work in self._works:
            work.wait()
        return self._arriving
