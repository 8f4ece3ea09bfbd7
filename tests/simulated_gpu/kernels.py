"""Kernels of a GPU that the CPU lacks, in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Segment(NamedTuple):
    """Segment of `varlen_attn`: queries that see the same keys, the last query at the last key."""

    queries: slice
    keys: slice
    repeats: int
    """Number of query heads per key head."""
    factor: float
    """Factor of the scores."""
    weights: Tensor
    """Attention weights, [heads, queries, keys] float32."""


def _segments(
    query: Tensor, key: Tensor, query_ends: Tensor, key_ends: Tensor, scale: float | None, window: Sequence[int] | None
) -> Iterator[_Segment]:
    left, right = window or (-1, -1)
    repeats, factor = query.shape[1] // key.shape[1], scale or 1 / math.sqrt(query.shape[-1])
    edges = query_ends.tolist(), key_ends.tolist()
    for query_start, query_end, key_start, key_end in zip(edges[0], edges[0][1:], edges[1], edges[1][1:]):
        queries, keys = slice(query_start, query_end), slice(key_start, key_end)
        place = torch.arange(key_end - key_start)
        distance = place[len(place) - (query_end - query_start) :, None] - place
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if right >= 0:
            hidden |= distance < -right
        if left >= 0:
            hidden |= distance > left
        scores = torch.einsum("qhd,khd->hqk", query[queries].float(), _repeated(key[keys], repeats)) * factor
        yield _Segment(queries, keys, repeats, factor, scores.masked_fill(hidden, -math.inf).softmax(-1))


def _repeated(part: Tensor, repeats: int) -> Tensor:
    return part.float().repeat_interleave(repeats, dim=1)


def _varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    is_causal: bool = False,
    scale: float | None = None,
    window: Sequence[int] | None = None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    output = torch.empty_like(query)
    for each in _segments(query, key, query_ends, key_ends, scale, window):
        found = torch.einsum("hqk,khd->qhd", each.weights, _repeated(value[each.keys], each.repeats))
        output[each.queries] = found.to(query.dtype)
    # only the backward kernel needs the logarithms of the sums, and it computes them itself here
    return output, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def _varlen_attn_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    is_causal: bool,
    state: Tensor,
    scale: float | None = None,
    window: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    of_query, of_key, of_value = (torch.zeros_like(part, dtype=torch.float32) for part in (query, key, value))
    for each in _segments(query, key, query_ends, key_ends, scale, window):
        out = gradient[each.queries].float()
        of_weights = torch.einsum("qhd,khd->hqk", out, _repeated(value[each.keys], each.repeats))
        of_scores = each.weights * (of_weights - (of_weights * each.weights).sum(-1, keepdim=True)) * each.factor
        of_query[each.queries] = torch.einsum("hqk,khd->qhd", of_scores, _repeated(key[each.keys], each.repeats))
        # a key head's gradient is the sum over all its query heads
        heads = (key.shape[1], each.repeats)
        keys = torch.einsum("hqk,qhd->khd", of_scores, query[each.queries].float())
        of_key[each.keys] += keys.unflatten(1, heads).sum(2)
        of_value[each.keys] += torch.einsum("hqk,qhd->khd", each.weights, out).unflatten(1, heads).sum(2)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _mm(left: Tensor, right: Tensor, out_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Multiplies as a GPU does: a product in half precision may leave the tensor cores in float32."""
    if out_dtype is not None:
        left, right = left.to(out_dtype), right.to(out_dtype)
    return torch.mm(left, right, **options)


def _addmm(added: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Multiplies in the same way and adds the result to a float32 tensor."""
    if out_dtype is not None:
        left, right = left.to(out_dtype), right.to(out_dtype)
    return torch.addmm(added, left, right, **options)


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::addmm": _addmm,
    "aten::mm": _mm,
    "torch_attn::_varlen_attn": _varlen_attn,
    "torch_attn::_varlen_attn_backward": _varlen_attn_backward,
}
"""Name of the operation -> function that replaces it, on the CPU's tensors."""
