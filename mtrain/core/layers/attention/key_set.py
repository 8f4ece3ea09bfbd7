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
    """The keys that the queries of a microbatch see: those in their document and window, and not after them, except
    that tokens of one image see each other both ways if the model says so."""

    documents: Documents | None = None
    """Documents of each row; None: each row is one document."""
    window: int | None = None
    """Largest number of keys up to its own that a query sees, including it; None: all keys up to its own."""
    images: Documents | None = None
    """Images of each row whose tokens see each other both ways, each inside a document; None: no query sees a key after
    its own. Requires `documents`."""
    num_ahead: int | None = None
    """Number of keys after the last query of a piece of an image; every query sees them. None: a piece of text."""
    chosen: Tensor | None = None
    """Mask of the keys that each query sees, [batch, 1, queries, keys] bool, only if each row is one document; None:
    all that the window allows."""

    def segments(self, runs: Sequence[Run], num_keys: int, device: torch.device) -> Segments:
        """Returns the pieces of all rows as kernels expect them; requires `documents`."""
        assert self.documents is not None
        return replace(_segments(self.documents, tuple(runs), num_keys, device), window=self.window)

    def mask(self, num_queries: int, num_keys: int, num_sinks: int, device: torch.device) -> Tensor | None:
        """Returns the mask of one piece, [..., queries, sinks + keys] bool, or on GPUs possibly torch's own mask type;
        None if query i sees the keys 0 to i, or in a piece of an image all keys.

        The last query is aligned to the last key, or to the key `num_ahead` before it. The first `num_sinks` keys are
        seen by every query.
        """
        if self.chosen is not None:
            seen = self.chosen
        elif self.num_ahead is not None:
            if self.window is None or self.window >= num_keys:
                return None
            last = num_keys - self.num_ahead
            positions = torch.arange(last - num_queries, last, device=device)
            seen = positions[:, None] - torch.arange(num_keys, device=device) < self.window
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


def with_image_ends(document_starts: Tensor | None, ends: Tensor | None) -> Tensor | None:
    """Joins what tells the keys that tokens see, as `key_set` expects it.

    Args:
        document_starts: Index at which each token's document starts, [batch, seq] on the CPU for full rows; None: each
            row is one document.
        ends: Index after the last key that each token sees, [batch, seq] int32 on the CPU: for tokens of images the end
            of the image. None: no token sees a later one.

    Returns:
        `document_starts`, or both, [2, batch, seq].
    """
    if ends is None:
        return document_starts
    return torch.stack((torch.zeros_like(ends) if document_starts is None else document_starts, ends))


def key_set(document_starts: Tensor | None, window: int | None, sees_ahead: bool = True) -> KeySet:
    """Returns the keys that the queries of a microbatch see in layers with this window.

    Args:
        document_starts: Result of `with_image_ends`.
        window: See `KeySet`.
        sees_ahead: Whether tokens of images see later ones, if `document_starts` tells where images end.
    """
    if document_starts is None:
        return KeySet(window=window)
    # cached on the tensor itself, which all layers receive and which lives as long as the microbatch; on the host,
    # since documents determine shapes, for which the host would otherwise wait for a GPU
    known: dict[tuple[int | None, bool], KeySet] | None = getattr(document_starts, "known_key_sets", None)
    if known is None:
        known = document_starts.known_key_sets = {}  # type: ignore[attr-defined]
    if (window, sees_ahead) not in known:
        starts, ends = document_starts if document_starts.dim() == 3 else (document_starts, None)
        images = None if ends is None or not sees_ahead else _images_of(ends)
        known[window, sees_ahead] = KeySet(documents_of(starts), window, images)
    return known[window, sees_ahead]


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Returns the window of a layer, counted from 1, or None; MTP depths have the window of the last layer."""
    number = min(layer_number, config.num_layers)
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number):
        return None
    return int(config.window_size[0]) + 1  # megatron-core does not count the query's own key


class Piece(NamedTuple):
    """Queries of one run inside one document, either text or of one image, with their keys, from the start of the
    document to the last query or the end of the image."""

    document: int
    """Number of the document in its row."""
    start: int
    """Position in the row at which the document starts."""
    num_queries: int
    num_keys: int
    num_ahead: int | None = None
    """Number of keys after the last query, see `KeySet`."""


def pieces_of(runs: Sequence[Run], documents: Sequence[Run], images: Sequence[Run] = ()) -> Iterator[Piece]:
    """Yields the pieces of a row for a rank's runs of positions; together they hold all its queries in order.

    `images` are those whose tokens see each other both ways, ascending, each inside a document.
    """
    for run_start, run_end in runs:
        for number, (document_start, document_end) in enumerate(documents):
            # queries of a run that begins inside a document also need the keys before the run
            start, end = max(run_start, document_start), min(run_end, document_end)
            for image_start, image_end in images:
                # a run may begin or end inside an image, whose other tokens are keys all the same
                first, last = max(start, image_start), min(end, image_end)
                if first < last:
                    if start < first:
                        yield Piece(number, document_start, first - start, first - document_start)
                    yield Piece(number, document_start, last - first, image_end - document_start, image_end - last)
                    start = last
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


def _images_of(ends: Tensor) -> Documents | None:
    """Returns the images of rows of several tokens from the index after the last key of each token, [batch, seq] on the
    CPU; None if there are none."""
    images = []
    for row in ends.numpy():
        # all tokens of an image have the same end, and no other token has it, since the last token of an image is one
        # of them
        starts = np.flatnonzero(np.diff(row, prepend=0))
        lengths = np.diff(starts, append=len(row))
        images.append(tuple((int(start), int(start + n)) for start, n in zip(starts, lengths) if n > 1))
    return tuple(images) if any(images) else None


def _lower_right(num_queries: int, num_keys: int) -> Tensor:
    """Returns a causal mask with the last query aligned to the last key, in the form that flash attention supports."""
    from torch.nn.attention.bias import causal_lower_right  # here, since it imports torch's compiler: takes seconds

    return causal_lower_right(num_queries, num_keys)
