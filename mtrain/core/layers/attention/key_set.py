"""Which keys each query sees: one value, from which the pieces and masks of all kernels are derived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn import functional

from mtrain.core.ranks.groups import to_device

Run = tuple[int, int]
"""Positions [start, end) of a row."""
Documents = tuple[tuple[Run, ...], ...]


@dataclass(frozen=True)
class KeySet:
    """The keys that the queries of a microbatch see: of their document, not after them, inside the window."""

    documents: Documents | None = None
    """None: each row is one document."""
    window: int | None = None
    """Largest number of keys that a query sees, its own included; None: all before it."""
    chosen: Tensor | None = None
    """[batch, 1, queries, keys] bool: the keys that each query sees, where rows are one document; None: all that the
    window allows."""

    def segments(self, runs: Sequence[Run], num_keys: int, device: torch.device) -> Segments:
        """Returns the pieces of all rows, which have several documents, in the form of kernels."""
        assert self.documents is not None
        return replace(_segments(self.documents, tuple(runs), num_keys, device), window=self.window)

    def mask(self, num_queries: int, num_keys: int, num_sinks: int, device: torch.device) -> Tensor | None:
        """Returns the mask of one piece, [queries, sinks + keys] bool or with leading axes, on GPUs perhaps in torch's
        own form; None where query i sees the keys 0 to i.

        The last query is at the last key. `num_sinks` keys come before the others, and every query sees them.
        """
        if self.chosen is not None:
            seen = self.chosen
        elif num_queries == num_keys and (self.window is None or self.window >= num_keys):
            return None
        elif device.type == "cuda" and (self.window is None or self.window >= num_keys):
            return _lower_right(num_queries, num_keys + num_sinks)
        else:
            seen = self.seen_from(torch.arange(num_keys - num_queries, num_keys, device=device), num_keys)
        return functional.pad(seen, (num_sinks, 0), value=True) if num_sinks else seen

    def seen_from(self, positions: Tensor, num_keys: int) -> Tensor:
        """Returns [queries, keys] bool: what queries at `positions` see of a document's first keys."""
        distance = positions[:, None] - torch.arange(num_keys, device=positions.device)
        return distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)


def key_set(document_starts: Tensor | None, window: int | None) -> KeySet:
    """Returns the keys that the queries of a microbatch see in layers with this window.

    `document_starts`, [batch, seq] on the CPU for full rows, has the start of each token's document; None: each row is
    one.
    """
    if document_starts is None:
        return KeySet(window=window)
    # Stored on the tensor itself, which all layers receive: it lives as long as the microbatch. On the host, because
    # the ends of documents decide on shapes, for which the host would have to wait for a GPU.
    known: dict[int | None, KeySet] | None = getattr(document_starts, "known_key_sets", None)
    if known is None:
        known = document_starts.known_key_sets = {}  # type: ignore[attr-defined]
    if window not in known:
        known[window] = KeySet(documents_of(document_starts), window)
    return known[window]


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Returns the window of a layer, counted from 1; depths of multi-token prediction are of the last layer's kind."""
    number = min(layer_number, config.num_layers)
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number):
        return None
    return int(config.window_size[0]) + 1  # megatron-core counts the keys before the query's own


class Piece(NamedTuple):
    """Queries of one run inside one document, and their keys: from the document's start to the last of them."""

    document: int
    """Number of the document in its row."""
    start: int
    """Position in the row at which the document starts."""
    num_queries: int
    num_keys: int


def pieces_of(runs: Sequence[Run], documents: Sequence[Run]) -> Iterator[Piece]:
    """Yields what a rank attends to in one row by its runs of positions; together the pieces hold its queries, in their
    order."""
    for run_start, run_end in runs:
        for number, (document_start, document_end) in enumerate(documents):
            # where a run begins inside a document, its queries need the keys from before the run as well
            start, end = max(run_start, document_start), min(run_end, document_end)
            if start < end:
                yield Piece(number, document_start, end - start, end - document_start)


@dataclass(frozen=True)
class Segments:
    """The pieces of all rows in the form of kernels for sequences of any length; tensors on the device."""

    query_ends: Tensor
    """[pieces + 1] int32, from 0: end of each piece's queries, rows one after the other."""
    key_ends: Tensor
    """[pieces + 1] int32: end of each piece's keys."""
    longest_query: int
    longest_key: int
    key_index: Tensor | None
    """[keys] int64: index of each key among those of all rows; None where they are in that order already."""
    window: int | None = None
    """Largest number of keys that a query sees, see `KeySet`."""


# cached: it is the same in every layer, recomputed ones included, and the host would make it again for each
@lru_cache(maxsize=16)
def _segments(documents: Documents, runs: tuple[Run, ...], num_keys: int, device: torch.device) -> Segments:
    pieces = [
        (row * num_keys + piece.start, piece) for row, own in enumerate(documents) for piece in pieces_of(runs, own)
    ]
    key_ends = list(accumulate((piece.num_keys for _, piece in pieces), initial=0))
    query_ends = list(accumulate((piece.num_queries for _, piece in pieces), initial=0))
    is_in_order = all(start == end for (start, _), end in zip(pieces, key_ends))
    if is_in_order and key_ends[-1] == len(documents) * num_keys:
        index = None
    else:
        index = torch.cat([torch.arange(start, start + piece.num_keys) for start, piece in pieces])
    return Segments(
        query_ends=to_device(torch.tensor(query_ends, dtype=torch.int32), device),
        key_ends=to_device(torch.tensor(key_ends, dtype=torch.int32), device),
        longest_query=max(piece.num_queries for _, piece in pieces),
        longest_key=max(piece.num_keys for _, piece in pieces),
        key_index=None if index is None else to_device(index, device),
    )


def documents_of(document_starts: Tensor) -> Documents:
    """Returns the documents of rows by their starts, [batch, seq] on the CPU."""
    rows, length = document_starts.numpy(), document_starts.shape[1]
    documents = []
    for row in rows:
        # starts never decrease along a row
        starts = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist()]
        documents.append(tuple(zip(starts, [*starts[1:], length])))
    return tuple(documents)


def _lower_right(num_queries: int, num_keys: int) -> Tensor:
    """Returns a causal mask with the last query at the last key, in the form that allows flash attention."""
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler: seconds that a CPU run saves

    return causal_lower_right(num_queries, num_keys)
