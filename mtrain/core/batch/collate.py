"""Samples to microbatches: rows of samples with, for each loss term, weights and shares of the denominator.

A row is a list of samples, laid one after the other and padded. Everything that a loss reads is made for each sample by
itself before it is laid down, so a sample counts the same wherever it lies.

Depth k of multi-token prediction reads the token k positions ahead and predicts the token after that, both inside the
document. Rows are whole here, so the later cut for context parallelism needs no neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain.config import Config
from mtrain.config.schema.loss import MAIN_TERM, LossSection, TermSection, depth_term
from mtrain.core.batch.batch import DOCUMENT_STARTS, FieldPath, Microbatch, MtpTargets
from mtrain.core.batch.choices import choice_shapes
from mtrain.core.batch.sample import Sample
from mtrain.core.loss.aggregation import TokenTerms, aggregate


def loss_terms(section: LossSection) -> dict[str, TermSection]:
    """Returns every loss term by name, the main one first."""
    return {MAIN_TERM: section, **section.side_terms}


@dataclass(frozen=True)
class RowForm:
    """Form that all rows of a run share."""

    width: int
    """Positions of a row."""
    terms: Mapping[str, TermSection]
    """Aggregation of each loss term."""
    is_packed: bool = False
    """Whether a row may hold several samples."""
    isolates_documents: bool = False
    """Whether documents do not see each other. Samples of one row never do."""
    with_padding: bool = False
    """Whether batches say which positions hold no text."""
    num_predictions: int = 1
    """Number of tokens that a position predicts. Each further one is a term of its own, aggregated as the main one."""
    with_sources: bool = False
    """Whether losses are reported by source."""
    window: int | None = None
    """Tokens that a windowed layer sees, including the token itself; None without such layers."""
    extras: tuple[str, ...] = ()
    """Names of the values that are read in addition to the weights; every sample has them."""
    choices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Choices that layers take from the batch: name -> [layers, k]."""

    @classmethod
    def of(cls, config: Config, extras: Sequence[str] = ()) -> RowForm:
        """Returns the form of the rows of a run whose loss functions and layers read these extras."""
        shapes = choice_shapes(config.model)
        return cls(
            width=config.row_width,
            terms=loss_terms(config.loss),
            is_packed=config.data.packing is not None,
            isolates_documents=config.data.isolate_documents,
            with_padding=config.model.experts is not None,
            num_predictions=config.model.num_predictions,
            with_sources=bool(config.data.source_names),
            window=config.model.sliding_window,
            extras=tuple(name for name in extras if name not in shapes),
            choices={name: shape for name, shape in shapes.items() if name in extras},
        )

    def dtypes(self, terms: Sequence[str]) -> dict[FieldPath, torch.dtype]:
        """Returns the dtype of every tensor of a batch; each tensor is [batch, seq], those of choices [batch, seq,
        layers, k].

        Each tensor is [batch, seq], that of routed experts [batch, seq, layers, top_k].
        """
        dtypes: dict[FieldPath, torch.dtype] = {(name,): torch.int64 for name in ("tokens", "labels", "positions")}
        if self.isolates_documents:
            dtypes[DOCUMENT_STARTS] = torch.int32
        if self.is_packed:
            dtypes["sequence_ids",] = torch.int64
        if self.with_padding:
            dtypes["is_padding",] = torch.bool
        if self.with_sources:
            dtypes["sources",] = torch.int64
        for depth in map(str, range(self.num_predictions - 1)):
            dtypes |= {("mtp", depth, "tokens"): torch.int64, ("mtp", depth, "labels"): torch.int64}
            if self.with_padding:
                dtypes["mtp", depth, "is_padding"] = torch.bool
        for term in terms:
            # denominator weights in float64: their sum is compared with the plan, and float32 loses counts above 2^24
            dtypes |= {("weights", term): torch.float32, ("denominator_weights", term): torch.float64}
        dtypes |= {("extras", name): torch.float32 for name in self.extras}
        return dtypes | {("choices", name): torch.int32 for name in self.choices}


class Place(NamedTuple):
    """Where a sample lies in a microbatch."""

    row: int
    number: int
    """Number of the sample in its row, counted from 0."""


Collate = Callable[[Sequence[Sequence[Sample]], RowForm, Place | None], Microbatch]
"""Signature of `collate`."""


@dataclass(frozen=True)
class _PlacedSample:
    """One sample as it lies in a row; arrays are [width]."""

    sample: Sample
    """The sample; one position of padding if it had no text."""
    is_text: NDArray[np.bool_]
    document_starts: NDArray[np.int32]
    """Index in the sample of the first token of each token's document."""


def collate(rows: Sequence[Sequence[Sample]], form: RowForm, first_of_step: Place | None) -> Microbatch:
    """Builds the microbatch of one forward pass.

    Args:
        rows: Samples of each row. An empty row fills the microbatch up: its weights and shares are 0.
        first_of_step: Place of the sample in slot 0 of the global batch; None if it is not in these rows.
    """
    laid = [[_piece(sample, form) for sample in row] for row in rows]
    starts = _document_starts(laid, form)
    # before any cut: the token k positions ahead may later be on another context-parallel rank
    further = {
        depth_term(depth): [[_ahead(piece, depth) for piece in row] for row in laid]
        for depth in range(1, form.num_predictions)
    }
    by_term = {name: _aggregated(laid, term, name == MAIN_TERM, first_of_step) for name, term in form.terms.items()}
    # a depth has fewer tokens, so other lengths
    by_term |= {name: _aggregated(each, form.terms[MAIN_TERM], False, first_of_step) for name, each in further.items()}
    is_text = _laid([[piece.is_text for piece in row] for row in laid], form.width, np.bool_)
    ids, num_sequences = _sequence_ids(laid, form.width)
    # a token attends to the tokens of its document up to itself
    seen = (np.arange(form.width) - starts + 1)[is_text.numpy()].astype(np.int64)
    return Microbatch(
        tokens=_of_samples(laid, "tokens", form.width),
        labels=_of_samples(laid, "labels", form.width),
        # positions begin again at each document, as if it stood alone in the row
        positions=torch.from_numpy(np.arange(form.width) - starts),
        weights={
            name: _laid([[each.weights for each in row] for row in of_rows], form.width, np.float32)
            for name, of_rows in by_term.items()
        },
        denominator_weights={
            name: _laid([[each.denominator_weights for each in row] for row in of_rows], form.width, np.float64)
            for name, of_rows in by_term.items()
        },
        # None, not zeros: attention then need not look for documents in the row
        document_starts=torch.from_numpy(starts) if form.isolates_documents else None,
        sequence_ids=torch.from_numpy(ids) if form.is_packed else None,
        is_padding=~is_text if form.with_padding else None,
        sources=_sources(laid, form.width) if form.with_sources else None,
        mtp=tuple(_targets(each, form) for each in further.values()),
        extras={
            name: _laid([[piece.sample.extras[name] for piece in row] for row in laid], form.width, np.float32)
            for name in form.extras
        },
        choices={name: _choice(laid, name, form) for name in form.choices},
        num_sequences=num_sequences,
        num_padding_tokens=is_text.numel() - int(is_text.sum()),
        # counted by weights, not by the mask: a sample of weight 0 counts nothing
        num_loss_tokens=sum(int(np.count_nonzero(each.weights)) for row in by_term[MAIN_TERM] for each in row),
        num_pairs=int(seen.sum()),
        num_window_pairs=int(seen.sum() if form.window is None else np.minimum(seen, form.window).sum()),
        num_output_rows=_num_weighed({name: by_term[name] for name in form.terms})
        + sum(_num_weighed({name: by_term[name]}) for name in further),
    )


def _num_weighed(by_term: Mapping[str, Sequence[Sequence[TokenTerms]]]) -> int:
    """Counts the positions that at least one of the terms counts."""
    samples = zip(*([each for row in rows for each in row] for rows in by_term.values()))
    return sum(int(np.any([each.weights != 0 for each in terms], axis=0).sum()) for terms in samples)


def _piece(sample: Sample, form: RowForm) -> _PlacedSample:
    is_text = np.ones(sample.width, np.bool_)
    if not len(sample.tokens):
        nothing = np.zeros(1, np.int64)
        sample = replace(sample, tokens=nothing, labels=nothing, mask=np.zeros(1), document_starts=None)
        is_text[:] = False
    starts = sample.document_starts if form.isolates_documents else None
    return _PlacedSample(sample, is_text, np.zeros(sample.width, np.int32) if starts is None else starts)


def _ahead(piece: _PlacedSample, depth: int) -> _PlacedSample:
    """Returns the sample as a depth of multi-token prediction sees it; positions without such a token hold no text."""
    starts = piece.document_starts
    return replace(piece, sample=mtp_sample(piece.sample, starts, depth), is_text=moved(piece.is_text, starts, depth))


def _targets(rows: Sequence[Sequence[_PlacedSample]], form: RowForm) -> MtpTargets:
    is_text = _laid([[piece.is_text for piece in row] for row in rows], form.width, np.bool_)
    return MtpTargets(
        tokens=_of_samples(rows, "tokens", form.width),
        labels=_of_samples(rows, "labels", form.width),
        is_padding=~is_text if form.with_padding else None,
    )


def _aggregated(
    rows: Sequence[Sequence[_PlacedSample]], term: TermSection, is_main: bool, first_of_step: Place | None
) -> list[list[TokenTerms]]:
    return [
        [_terms(piece.sample, term, is_main, (row, number) == first_of_step) for number, piece in enumerate(pieces)]
        for row, pieces in enumerate(rows)
    ]


def _terms(sample: Sample, term: TermSection, is_main: bool, is_first_in_step: bool) -> TokenTerms:
    mask, weight = sample.mask, sample.weight
    if sample.member is not None:
        if is_main:
            weight = 1.0  # the preference loss decides how much the group counts
        elif sample.member.role != "chosen":
            mask = np.zeros_like(mask)
    return aggregate(mask, weight, term, is_first_in_step)


def _document_starts(rows: Sequence[Sequence[_PlacedSample]], form: RowForm) -> NDArray[np.int32]:
    """Returns [rows, width]: index in the row at which each position's document begins."""
    starts = np.zeros((len(rows), form.width), np.int32)
    if not form.isolates_documents:
        return starts
    for row, pieces in zip(starts, rows):
        begin = 0
        for piece in pieces:
            row[begin : begin + piece.sample.width] = begin + piece.document_starts
            begin += piece.sample.width
        # padding is a document of its own, so that it attends to no text
        row[begin:] = begin
    return starts


def _sequence_ids(rows: Sequence[Sequence[_PlacedSample]], width: int) -> tuple[NDArray[np.int64], int]:
    """Returns [rows, width], the number of each position's sequence in the microbatch, and the number of sequences.

    Padding belongs to the last sample of its row, and a row without samples is a sequence without text.
    """
    ids, count = np.zeros((len(rows), width), np.int64), 0
    for row, pieces in zip(ids, rows):
        widths = [piece.sample.width for piece in pieces] or [width]
        own = np.repeat(np.arange(count, count + len(widths)), widths)
        row[: len(own)], row[len(own) :] = own, own[-1]
        count += len(widths)
    return ids, count


def _sources(rows: Sequence[Sequence[_PlacedSample]], width: int) -> Tensor:
    """Returns [rows, width]: the number of each position's source; 0 in padding, which counts nothing."""

    def numbers(sample: Sample) -> NDArray[np.int64]:
        return np.full(sample.width, -1 if sample.source is None else sample.source)

    return _laid([[numbers(piece.sample) for piece in row] for row in rows], width, np.int64)


def _of_samples(rows: Sequence[Sequence[_PlacedSample]], name: str, width: int) -> Tensor:
    """Lays an int64 field of the samples into rows."""
    return _laid([[getattr(piece.sample, name) for piece in row] for row in rows], width, np.int64)


def _choice(rows: Sequence[Sequence[_PlacedSample]], name: str, form: RowForm) -> Tensor:
    """Returns [rows, width, layers, k]: the choice of each position, -1 where no sample names any."""
    shape = form.choices[name]

    def of_sample(sample: Sample) -> NDArray[np.int32]:
        nothing = np.broadcast_to(np.int32(-1), (sample.width, *shape))
        return sample.choices.get(name, nothing)

    parts = [[of_sample(piece.sample) for piece in row] for row in rows]
    return _laid(parts, form.width, np.int32, shape, filler=-1)


def _laid(
    rows: Sequence[Sequence[NDArray[Any]]],
    width: int,
    dtype: type[np.generic],
    shape: tuple[int, ...] = (),
    filler: int = 0,
) -> Tensor:
    """Returns [rows, width, *shape]: the parts of each row one after the other, followed by the filler."""
    whole = np.full((len(rows), width, *shape), filler, dtype)
    for row, parts in zip(whole, rows):
        if parts:
            joined = np.concatenate(parts)
            row[: len(joined)] = joined
    return torch.from_numpy(whole)


Value = TypeVar("Value", np.int64, np.float64, np.bool_)


def mtp_sample(sample: Sample, document_starts: NDArray[np.int32], depth: int) -> Sample:
    """Moves tokens, labels and mask of a whole row as `moved` does."""
    return Sample(
        tokens=moved(sample.tokens, document_starts, depth),
        labels=moved(sample.labels, document_starts, depth),
        mask=moved(sample.mask, document_starts, depth),
        weight=sample.weight,
    )


def moved(values: NDArray[Value], document_starts: NDArray[np.int32], depth: int) -> NDArray[Value]:
    """Returns the values, [seq], `depth` positions further in the same document; 0 beyond the end of the document or
    row.

    Args:
        document_starts: [seq]: index in the row of the first token of each token's document.
    """
    found = np.zeros_like(values)
    found[:-depth] = np.where(document_starts[depth:] == document_starts[:-depth], values[depth:], values.dtype.type(0))
    return found
