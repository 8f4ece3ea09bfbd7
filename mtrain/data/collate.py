"""Samples to microbatches: stacked rows with, for each loss term, weights and shares of the denominator."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain.config.schema.loss import LossSection, TermSection, depth_term
from mtrain.data.batch import Microbatch, MtpTargets
from mtrain.data.samples.mtp import moved, mtp_sample
from mtrain.data.samples.sample import Sample
from mtrain.loss.aggregation import TokenTerms, aggregate
from mtrain.loss.pair import MAIN_TERM


def loss_terms(section: LossSection) -> dict[str, TermSection]:
    """Every term by name, the main one first."""
    return {MAIN_TERM: section, **section.side_terms}


def collate(
    samples: Sequence[Sample | None],
    seq_length: int,
    terms: Mapping[str, TermSection],
    first_of_step: int | None,
    with_documents: bool,
    with_padding: bool,
    mtp_depths: int = 0,
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
        mtp_depths: How many further tokens are predicted. Each depth is a term of its own, aggregated as the main one.
    """
    rows = [_filler(seq_length) if sample is None else sample for sample in samples]
    starts = [_starts(row, seq_length, with_documents) for row in rows]
    # from whole rows, before any cut: what lies k tokens ahead may later be on another context-parallel rank
    further = {
        depth_term(depth): [mtp_sample(row, start, depth) for row, start in zip(rows, starts)]
        for depth in range(1, mtp_depths + 1)
    }
    by_term = {name: _terms(samples, rows, term, first_of_step) for name, term in terms.items()}
    # lengths of a depth are those of its own mask, which has fewer tokens
    by_term |= {name: _terms(samples, each, terms[MAIN_TERM], first_of_step) for name, each in further.items()}
    # they begin again at each document, as if it stood alone in the row
    positions = [np.arange(seq_length) - start for start in starts]
    return Microbatch(
        tokens=_stacked([row.tokens for row in rows]),
        labels=_stacked([row.labels for row in rows]),
        positions=_stacked([position.astype(np.int64) for position in positions]),
        weights={name: _stacked([row.weights for row in of_rows]) for name, of_rows in by_term.items()},
        denominator_weights={
            name: _stacked([row.denominator_weights for row in of_rows]) for name, of_rows in by_term.items()
        },
        # None, not zeros: attention then need not look for documents in the row
        document_starts=_stacked(starts) if with_documents else None,
        is_padding=_stacked([_padding(row) for row in rows]) if with_padding else None,
        mtp=tuple(
            MtpTargets(
                tokens=_stacked([row.tokens for row in each]),
                labels=_stacked([row.labels for row in each]),
                is_padding=_without_token_ahead(rows, starts, depth) if with_padding else None,
            )
            for depth, each in enumerate(further.values(), start=1)
        ),
        num_padding_tokens=sum(row.num_padding for row in rows),
        # counted by weights, not by the mask: a sample of weight 0 counts nothing
        num_loss_tokens=sum(int(np.count_nonzero(row.weights)) for row in by_term[MAIN_TERM]),
    )


def _without_token_ahead(rows: Sequence[Sample], starts: Sequence[NDArray[np.int32]], depth: int) -> torch.Tensor:
    return ~_stacked([moved(~_padding(row), start, depth) for row, start in zip(rows, starts)])


def _starts(row: Sample, seq_length: int, with_documents: bool) -> NDArray[np.int32]:
    if row.document_starts is None or not with_documents:
        return np.zeros(seq_length, np.int32)
    return row.document_starts


def _terms(
    samples: Sequence[Sample | None], rows: Sequence[Sample], term: TermSection, first_of_step: int | None
) -> list[TokenTerms]:
    """One term of every row; of a row without a sample nothing counts."""
    return [
        # not `aggregate` on an empty mask: with empty_sequences=include it would count the filler as a sequence
        TokenTerms(np.zeros(len(row.mask), np.float32), np.zeros(len(row.mask), np.float64))
        if sample is None
        else aggregate(row.mask, sample.weight, term, index == first_of_step)
        for index, (sample, row) in enumerate(zip(samples, rows))
    ]


def _filler(seq_length: int) -> Sample:
    nothing = np.zeros(seq_length, np.int64)
    return Sample(tokens=nothing, labels=nothing, mask=np.zeros(seq_length), num_padding=seq_length)


def _padding(row: Sample) -> NDArray[np.bool_]:
    return np.arange(len(row.tokens)) >= len(row.tokens) - row.num_padding


def _stacked(rows: Sequence[NDArray[np.generic]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows))
