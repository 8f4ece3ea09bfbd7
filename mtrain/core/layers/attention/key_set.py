"""Which keys each query sees: one value that determines the pieces and masks for all kernels."""

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
    """The keys that the queries of a microbatch see: those in their document and window, and not after them."""

    documents: Documents | None = None
    """Documents of each row; None: each row is one document."""
    window: int | None = None
    """Largest number of keys that a query sees, including its own; None: all keys up to its own."""
    chosen: Tensor | None = None
    """Mask of the keys that each query sees, [batch, 1, queries, keys] bool, only if each row is one document; None:
    all that the window allows."""

    def segments(self, runs: Sequence[Run], num_keys: int, device: torch.device) -> Segments:
        """Returns the pieces of all rows as kernels expect them; requires `documents`."""
        assert self.documents is not None
        return replace(_segments(self.documents, tuple(runs), num_keys, device), window=self.window)

    def mask(self, num_queries: int, num_keys: int, num_sinks: int, device: torch.device) -> Tensor | None:
        """Returns the mask of one piece, [..., queries, sinks + keys] bool, or on GPUs possibly torch's own mask type;
        None if query i sees the keys 0 to i.

        The last query is aligned to the last key. The first `num_sinks` keys are seen by every query.
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
        """Returns which of a document's first keys the queries at `positions` see, [queries, keys] bool."""
        distance = positions[:, None] - torch.arange(num_keys, device=positions.device)
        return distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)


def key_set(document_starts: Tensor | None, window: int | None) -> KeySet:
    """Returns the keys that the queries of a microbatch see in layers with this window.

    `document_starts` has the index at which each token's document starts, [batch, seq] on the CPU for full rows; None:
    each row is one document.
    """
    if document_starts is None:
        return KeySet(window=window)
    # cached on the tensor itself, which all layers receive and which lives as long as the microbatch; on the host,
    # since documents determine shapes, for which the host would otherwise wait for a GPU
    known: dict[int | None, KeySet] | None = getattr(document_starts, "known_key_sets", None)
    if known is None:
        known = document_starts.known_key_sets = {}  # type: ignore[attr-defined]
    if window not in known:
        known[window] = KeySet(documents_of(document_starts), window)
    return known[window]


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Returns the window of a layer, counted from 1, or None; MTP depths have the window of the last layer."""
    number = min(layer_number, config.num_layers)
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number):
        return None
    return int(config.window_size[0]) + 1  # megatron-core does not count the query's own key


class Piece(NamedTuple):
    """The queries of one run inside one document, with their keys, from the start of the document to the last query."""

    document: int
    """Number of the document in its row."""
    start: int
    """Position in the row at which the document starts."""
    num_queries: int
    num_keys: int


def pieces_of(runs: Sequence[Run], documents: Sequence[Run]) -> Iterator[Piece]:
    """Yields the pieces of a row for a rank's runs of positions; together they hold all its queries in order."""
    for run_start, run_end in runs:
        for number, (document_start, document_end) in enumerate(documents):
            # queries of a run that begins inside a document also need the keys before the run
            start, end = max(run_start, document_start), min(run_end, document_end)
            if start < end:
                yield Piece(number, document_start, end - start, end - document_start)


@dataclass(frozen=True)
class Segments:
    """The pieces of all rows, as kernels for sequences of any length expect them; tensors are on the device."""

    query_ends: Tensor
    """0 and the end of the queries of each piece in the concatenated rows, [pieces + 1] int32."""
    key_ends: Tensor
    """0 and the end of the keys of each piece, [pieces + 1] int32."""
    longest_query: int
    longest_key: int
    key_index: Tensor | None
    """Index of each key in the concatenated rows, [keys] int64; None if they are already in that order."""
    window: int | None = None
    """Largest number of keys that a query sees, see `KeySet`."""


# cached, since the host would otherwise compute it anew for every layer, even in recomputation
@lru_cache(maxsize=16)
def _segments(documents: Documents, runs: tuple[Run, ...], num_keys: int, device: torch.device) -> Segments:
    pieces = [
        (row * num_keys + piece.start, piece)
        for row, row_documents in enumerate(documents)
        for piece in pieces_of(runs, row_documents)
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
    """Returns the documents of rows from the start of each token's document, [batch, seq] on the CPU."""
    rows, length = document_starts.numpy(), document_starts.shape[1]
    documents = []
    for row in rows:
        # starts never decrease along a row
        starts = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist()]
        documents.append(tuple(zip(starts, [*starts[1:], length])))
    return tuple(documents)


def _lower_right(num_queries: int, num_keys: int) -> Tensor:
    """Returns a causal mask with the last query aligned to the last key, in the form that flash attention supports."""
    from torch.nn.attention.bias import causal_lower_right  # here, since it imports torch's compiler: takes seconds

    return causal_lower_right(num_queries, num_keys)
