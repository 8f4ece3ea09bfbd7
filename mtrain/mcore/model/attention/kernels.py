"""torch's attention kernels with the log-sum-exp of the scores, which autograd's own functions hide."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, assert_never

import torch
from torch import Tensor
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
    """Attends with all queries to all keys, or causally where there are as many.

    Args:
        query: [batch, heads, queries, dim].
        key: [batch, groups, keys, dim]; groups divide the heads.
        value: Values, in the shape of key.
        scale: Scale of the scores.
        is_causal: Whether query i sees only keys 0 to i.
    """
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
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, found: AttendedPart, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of queries, keys and values, those of keys and values summed over the heads that share
    them.

    Args:
        gradient: Gradient of the output, [batch, heads, queries, dim].
        query: Queries given to `attend`.
        key: Keys given to `attend`.
        value: Values given to `attend`.
        found: Attention to ALL keys, of which these may be a part: their share of it follows.
        scale: Scale given to `attend`.
        is_causal: Flag given to `attend`.
    """
    kernel, dim, groups = kernel_of(query), query.shape[-1], key.shape[1]
    query, key, value = _prepared(kernel, query, key, value)
    gradient, output = (_padded(kernel, part) for part in (gradient, found.output))
    aten: Any = torch.ops.aten
    exponents = found.exponents.contiguous()
    given: tuple[Any, ...] = (gradient, query, key, value)
    match kernel:
        case "cpu":
            function = aten._scaled_dot_product_flash_attention_for_cpu_backward
            parts = function(*given, output, exponents, 0.0, is_causal, scale=scale)
        case "flash":
            function = aten._scaled_dot_product_flash_attention_backward
            lengths = (None, None, query.shape[2], key.shape[2])  # no ends of sequences with different lengths
            states = torch.empty(2, dtype=torch.int64, device=query.device).view(torch.uint64)  # states of dropout
            given = (*given, output, exponents, *lengths, 0.0, is_causal, states, torch.empty_like(states[:0]))
            parts = function(*given, scale=scale)
        case "efficient":
            function = aten._scaled_dot_product_efficient_attention_backward
            exponents = functional.pad(exponents, (0, -exponents.shape[-1] % 32), value=float("inf"))
            state = torch.empty((), dtype=torch.int64, device=query.device)
            wanted = [True, True, True, False]
            given = (*given, None, output, exponents, state, state, 0.0, wanted, is_causal)
            parts = function(*given, scale=scale)
        case _:
            assert_never(kernel)
    of_query, of_key, of_value = (part[..., :dim] for part in parts[:3])
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
