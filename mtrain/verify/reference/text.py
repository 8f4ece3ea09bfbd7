"""Rows of a global batch, made from raw token ids and the edges between documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """Sample as it was read, not shifted, masked or padded."""

    ids: NDArray[np.int64]
    """Token ids, [n], 1 <= n <= seq_length + 1."""
    counts: NDArray[np.float64]
    """Weight of the prediction of each token, [n]; the first one is never predicted."""
    weight: float = 1.0
    """Weight v_i of the sample."""
    edges: tuple[int, ...] = ()
    """Positions in `ids` where an isolated document begins, ascending, never 0."""
    extras: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Extras of each token by name, [n]; the first number is not used."""


@dataclass(frozen=True)
class Rows:
    """Rows of a global batch, one per sample; [batch, seq] except `sample_weights`."""

    tokens: Tensor
    labels: Tensor
    """Labels; 0 where there is no next token or it does not count."""
    weights: Tensor
    """Weight w_it of the prediction at each position, float64."""
    documents: Tensor
    """Number of the document in the row; -1 where there is no text."""
    positions: Tensor
    """Position in the document."""
    sample_weights: Tensor
    """Weights v_i of the samples, [batch] float64."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Extras of the token that is predicted, by name, float64."""

    @property
    def is_text(self) -> Tensor:
        """Says which positions hold text, [batch, seq] bool."""
        return self.documents >= 0

    def ahead(self, depth: int) -> Ahead:
        """Returns the rows shifted by `depth` tokens within the same document."""
        missing = torch.full((len(self.tokens), depth), -1, device=self.documents.device)
        there = torch.cat([self.documents[:, depth:], missing], dim=1)
        known = (there == self.documents) & self.is_text

        def moved(values: Tensor) -> Tensor:
            return torch.where(known, torch.roll(values, -depth, dims=1), torch.zeros_like(values))

        return Ahead(moved(self.tokens), moved(self.labels), moved(self.weights), known)


@dataclass(frozen=True)
class Ahead:
    """Rows of one depth of multi-token prediction; [batch, seq]."""

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    is_text: Tensor
    """Positions that have a token that far ahead in their document."""


def rows_of(texts: Sequence[Text], seq_length: int, vocab_size: int, device: torch.device) -> Rows:
    """Makes rows in which position t holds token t and predicts token t + 1, unless that begins another document.

    Args:
        texts: All samples of a global batch.
        seq_length: Number of positions of a row.
        vocab_size: Number modulo which token ids are taken.
        device: Device of the tensors.
    """
    rows = [_row(text, seq_length, vocab_size) for text in texts]

    def stacked(name: str) -> Tensor:
        return torch.from_numpy(np.stack([row[name] for row in rows])).to(device)

    weights = torch.tensor([text.weight for text in texts], dtype=torch.float64, device=device)
    return Rows(
        tokens=stacked("tokens"),
        labels=stacked("labels"),
        weights=stacked("weights"),
        documents=stacked("documents"),
        positions=stacked("positions"),
        sample_weights=weights,
        extras={name: _extra(texts, name, seq_length).to(device) for name in texts[0].extras},
    )


def _extra(texts: Sequence[Text], name: str, seq_length: int) -> Tensor:
    rows = torch.zeros(len(texts), seq_length, dtype=torch.float64)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text.ids) - 1] = torch.from_numpy(text.extras[name][1:])
    return rows


def _row(text: Text, seq_length: int, vocab_size: int) -> dict[str, NDArray[Any]]:
    size = len(text.ids) - 1
    row: dict[str, NDArray[Any]] = {
        "tokens": np.zeros(seq_length, np.int64),
        "labels": np.zeros(seq_length, np.int64),
        "weights": np.zeros(seq_length, np.float64),
        "documents": np.full(seq_length, -1, np.int64),
        "positions": np.zeros(seq_length, np.int64),
    }
    begun, start = 0, 0
    for place in range(size):
        if place in text.edges:
            begun, start = begun + 1, place
        row["tokens"][place] = text.ids[place] % vocab_size
        row["documents"][place], row["positions"][place] = begun, place - start
        if place + 1 not in text.edges and text.counts[place + 1] > 0:
            row["labels"][place] = text.ids[place + 1] % vocab_size
            row["weights"][place] = text.counts[place + 1]
    return row
