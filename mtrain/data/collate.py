"""Samples to microbatches: stacked rows with, for each loss term, weights and shares of the denominator."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain.config.loss import LossSection, TermSection
from mtrain.data.aggregate import TokenTerms, aggregate
from mtrain.data.batch import Microbatch
from mtrain.data.sample import Sample

MAIN = "main"
"""The term that `loss.function` computes, beside the named side terms."""


def loss_terms(section: LossSection) -> dict[str, TermSection]:
    """Every term by name, the main one first."""
    return {MAIN: section, **section.side_terms}


def collate(
    samples: Sequence[Sample | None],
    seq_length: int,
    terms: Mapping[str, TermSection],
    first_of_step: int | None,
    with_documents: bool,
    with_padding: bool,
) -> Microbatch:
    """Rows of one forward pass.

    Args:
        samples: One a row. None makes a row that fills the microbatch up: it is not a sequence, so its weights and
            shares are 0 whatever the aggregation.
        seq_length: Positions of a row.
        terms: Aggregation of each loss term.
        first_of_step: The row that has slot 0 of the global batch, if it is here.
        with_documents: Whether rows are isolated documents; those without edges count as one.
        with_padding: Whether somebody asks which positions hold no text.
    """
    rows = [_filler(seq_length) if sample is None else sample for sample in samples]
    starts = [np.zeros(seq_length, np.int32) if row.document_starts is None else row.document_starts for row in rows]
    by_term = {
        name: [_terms(sample, seq_length, term, row == first_of_step) for row, sample in enumerate(samples)]
        for name, term in terms.items()
    }
    positions = [np.arange(seq_length) - (start if with_documents else 0) for start in starts]
    return Microbatch(
        tokens=_stacked([row.tokens for row in rows]),
        labels=_stacked([row.labels for row in rows]),
        positions=_stacked([position.astype(np.int64) for position in positions]),
        weights={name: _stacked([row.weights for row in of_rows]) for name, of_rows in by_term.items()},
        shares={name: _stacked([row.shares for row in of_rows]) for name, of_rows in by_term.items()},
        document_starts=_stacked(starts) if with_documents else None,
        is_padding=_stacked([_padding(row) for row in rows]) if with_padding else None,
    )


def _terms(sample: Sample | None, seq_length: int, term: TermSection, is_first_in_step: bool) -> TokenTerms:
    if sample is None:
        return TokenTerms(np.zeros(seq_length, np.float32), np.zeros(seq_length, np.float64))
    return aggregate(sample.mask, sample.weight, term, is_first_in_step)


def _filler(seq_length: int) -> Sample:
    nothing = np.zeros(seq_length, np.int64)
    return Sample(tokens=nothing, labels=nothing, mask=np.zeros(seq_length), num_padding=seq_length)


def _padding(row: Sample) -> NDArray[np.bool_]:
    return np.arange(len(row.tokens)) >= len(row.tokens) - row.num_padding


def _stacked(rows: Sequence[NDArray[np.generic]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows))
