"""Attention inside the documents of a microbatch: which keys a query sees, and on GPUs one kernel for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from inspect import signature
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from mtrain.core.ranks.groups import to_device

Run = tuple[int, int]
"""Positions [start, end) of a row."""


class Piece(NamedTuple):
    """Queries of one run inside one document, and their keys: from the document's start to the last of them."""

    document: int
    """Number of the document in its row."""
    start: int
    """Position in the row at which the document starts."""
    num_queries: int
    num_keys: int


def pieces_of(runs: Sequence[Run], documents: Sequence[Run]) -> Iterator[Piece]:
    """Yields what a rank attends to in one row; together the pieces hold its queries, in their order.

    Args:
        runs: Positions of the row whose queries the rank holds, one after the other.
        documents: All documents of the row.
    """
    for run_start, run_end in runs:
        for number, (document_start, document_end) in enumerate(documents):
            # where a run begins inside a document, its queries need the keys from before the run as well
            start, end = max(run_start, document_start), min(run_end, document_end)
            if start < end:
                yield Piece(number, document_start, end - start, end - document_start)


@dataclass(frozen=True)
class Segments:
    """The pieces of all rows in the kernel's form; tensors on the device."""

    query_ends: Tensor
    """[pieces + 1] int32, from 0: end of each piece's queries, rows one after the other."""
    key_ends: Tensor
    """[pieces + 1] int32: end of each piece's keys."""
    longest_query: int
    longest_key: int
    key_index: Tensor | None
    """[keys] int64: index of each key among those of all rows; None where they are in that order already."""


# cached: it is the same in every layer, and the host would make it again for each
@lru_cache(maxsize=16)
def segments_of(rows: tuple[tuple[Piece, ...], ...], seq: int, device: torch.device) -> Segments:
    """
    Args:
        rows: Pieces of each row.
        seq: Number of keys of a row.
        device: Device of the tensors; the host does not wait for their copies.
    """
    pieces = [(row * seq + piece.start, piece) for row, own in enumerate(rows) for piece in own]
    key_ends = list(accumulate((piece.num_keys for _, piece in pieces), initial=0))
    lie_so = all(start == end for (start, _), end in zip(pieces, key_ends)) and key_ends[-1] == len(rows) * seq
    index = None if lie_so else torch.cat([torch.arange(start, start + each.num_keys) for start, each in pieces])
    query_ends = list(accumulate((piece.num_queries for _, piece in pieces), initial=0))
    return Segments(
        query_ends=to_device(torch.tensor(query_ends, dtype=torch.int32), device),
        key_ends=to_device(torch.tensor(key_ends, dtype=torch.int32), device),
        longest_query=max(piece.num_queries for _, piece in pieces),
        longest_key=max(piece.num_keys for _, piece in pieces),
        key_index=None if index is None else to_device(index, device),
    )


def is_varlen_usable(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Says whether torch's kernel for sequences of any length, on GPUs and in half precision, accepts these."""
    fits = query.dtype in (torch.float16, torch.bfloat16) and key.shape[-1] == value.shape[-1]
    return query.device.type == "cuda" and fits and _has_varlen_kernel()


@cache
def _has_varlen_kernel() -> bool:
    # torch 2.9 lacks it; the first versions that have it know neither windows nor grouped heads
    if find_spec("torch.nn.attention.varlen") is None:
        return False
    return {"scale", "window_size", "enable_gqa"} <= signature(_varlen_kernel()).parameters.keys()


def _varlen_kernel() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler: seconds that a CPU run saves

    return varlen_attn


def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    window: int | None,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:
    """Attends causally in each piece, its last query at its last key; one kernel for the whole microbatch.

    Args:
        query: [seq_local, batch, heads, dim].
        key: [seq, batch, groups, dim] of whole rows.
        value: Values, in the shape of key.
        segments: Pieces of all rows.
        scale: Scale of the scores.
        window: Keys that a query sees at most, its own among them; None: all before it.
        kernel: Kernel with the arguments of torch.nn.attention.varlen.varlen_attn; None means that one.

    Returns:
        [seq_local, batch, heads, dim].
    """
    # [batch x seq, heads, dim]: rows one after the other
    queries, keys, values = (part.transpose(0, 1).flatten(0, 1) for part in (query, key, value))
    if segments.key_index is not None:
        keys, values = (part.index_select(0, segments.key_index) for part in (keys, values))
    output = (kernel or _varlen_kernel())(
        queries,
        keys,
        values,
        segments.query_ends,
        segments.key_ends,
        segments.longest_query,
        segments.longest_key,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    rows: Tensor = output.unflatten(0, (query.shape[1], query.shape[0]))
    return rows.transpose(0, 1)


def has_window(config: TransformerConfig, layer_number: int) -> bool:
    """Says whether a layer, counted from 1, has a window; layers after the model's last one are of its kind."""
    number = min(layer_number, config.num_layers)
    return bool(is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number))
