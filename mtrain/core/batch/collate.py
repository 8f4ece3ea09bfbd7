"""Turns samples into microbatches: padded rows of samples, with weights and shares of the denominator by loss term.

A row is a list of samples, concatenated and padded. All inputs of a loss are computed for each sample before it is
placed in a row, so its position does not matter.

MTP depth k reads the token k positions ahead and predicts the token after that, both inside the document. Rows are
still whole here, so slicing them later for context parallelism needs no neighbouring ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.config.schema.loss import MAIN_TERM, LossSection, TermSection, depth_term
from mtrain.core.batch.batch import DOCUMENT_STARTS, FieldPath, Microbatch, MtpTargets
from mtrain.core.batch.choices import choice_shapes
from mtrain.core.batch.images import MicrobatchImages, SampleImages
from mtrain.core.batch.sample import Sample
from mtrain.core.loss.aggregation import TokenTerms, aggregate


def loss_terms(section: LossSection) -> dict[str, TermSection]:
    """Returns every loss term by name, the main one first."""
    return {MAIN_TERM: section, **section.side_terms}


@dataclass(frozen=True)
class RowForm:
    """Shape and contents of the rows of a run."""

    width: int
    terms: Mapping[str, TermSection]
    """Aggregation of each loss term."""
    is_packed: bool = False
    """Whether a row may hold several samples."""
    isolates_documents: bool = False
    """Whether attention stays within documents. (It always stays within samples.)"""
    with_padding: bool = False
    """Whether batches say which positions hold no text."""
    num_predictions: int = 1
    """Number of tokens that a position predicts. Each token after the first is a term of its own (an MTP depth),
    aggregated like the main term."""
    with_sources: bool = False
    window: int | None = None
    """Number of tokens that a layer with a window sees, including the token itself; None without such layers."""
    extras: tuple[str, ...] = ()
    """Names of the values that loss functions read in addition to the weights; every sample has them."""
    choices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """[layers, k] of the choices that layers take from the batch, by name."""
    patches_per_feature: int | None = None
    """Number of patches that a vision tower makes one feature; None for a model without one."""
    bidirectional_images: bool = False
    """Whether tokens of an image see each other both ways."""

    @classmethod
    def of(cls, config: Config, extras: Sequence[str] = ()) -> RowForm:
        """Returns the form of the rows of a run; `extras` are the names that its loss functions and layers read."""
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
            patches_per_feature=None if config.model.vision is None else config.model.vision.patches_per_feature,
            bidirectional_images=config.model.has_bidirectional_images,
        )

    def dtypes(self, terms: Sequence[str]) -> dict[FieldPath, torch.dtype]:
        """Returns the dtype of every tensor of a batch by path, without images; choices are [batch, seq, layers, k],
        all others [batch, seq]."""
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
            # float64, since the sum is compared with the planned denominator, and float32 loses counts above 2^24
            dtypes |= {("weights", term): torch.float32, ("denominator_weights", term): torch.float64}
        dtypes |= {("extras", name): torch.float32 for name in self.extras}
        return dtypes | {("choices", name): torch.int32 for name in self.choices}


class Place(NamedTuple):
    """Position of a sample in a microbatch."""

    row: int
    number: int
    """Number of the sample in its row, counted from 0."""


@dataclass(frozen=True)
class _PlacedSample:
    """One sample in its row; arrays are [width]."""

    sample: Sample
    """The sample, or one position of padding if it has no text."""
    is_text: NDArray[np.bool_]
    document_starts: NDArray[np.int32]
    """Index in the sample of the first token of each token's document."""


def collate(rows: Sequence[Sequence[Sample]], form: RowForm, first_of_step: Place | None) -> Microbatch:
    """Builds the microbatch of one forward pass.

    Args:
        rows: Samples of each row. An empty row only fills the microbatch; its weights and shares are 0.
        first_of_step: Place of the sample in slot 0 of the global batch; None if it is not in these rows.
    """
    placed = [[_piece(sample, form) for sample in row] for row in rows]
    starts = _document_starts(placed, form)
    # from whole rows, since the token k positions ahead may later be on another context-parallel rank
    ahead = {
        depth_term(depth): [[_ahead(piece, depth) for piece in row] for row in placed]
        for depth in range(1, form.num_predictions)
    }
    by_term = {name: _aggregated(placed, term, name == MAIN_TERM, first_of_step) for name, term in form.terms.items()}
    num_output_rows = _num_weighed(by_term.values())
    # aggregated anew for each depth, which has fewer tokens and therefore other lengths
    for name, pieces in ahead.items():
        by_term[name] = _aggregated(pieces, form.terms[MAIN_TERM], False, first_of_step)
        num_output_rows += _num_weighed([by_term[name]])
    is_text = _as_rows(placed, _IS_TEXT, form.width, np.bool_)
    ids, num_sequences = _sequence_ids(placed, form.width)
    # a token sees the tokens of its document up to itself
    num_visible = (np.arange(form.width) - starts + 1)[is_text.numpy()].astype(np.int64)
    main = itertools.chain.from_iterable(by_term[MAIN_TERM])
    # positions start anew in each document, as if it were alone in the row
    positions = torch.from_numpy(np.arange(form.width) - starts)
    images = _images(placed, positions, starts, form)
    num_ahead = _num_ahead(images)
    return Microbatch(
        tokens=_as_rows(placed, _TOKENS, form.width, np.int64),
        labels=_as_rows(placed, _LABELS, form.width, np.int64),
        positions=positions,
        weights={name: _as_rows(term_rows, _WEIGHTS, form.width, np.float32) for name, term_rows in by_term.items()},
        denominator_weights={
            name: _as_rows(term_rows, _SHARES, form.width, np.float64) for name, term_rows in by_term.items()
        },
        # None instead of zeros, so that attention need not look for documents
        document_starts=torch.from_numpy(starts) if form.isolates_documents else None,
        sequence_ids=torch.from_numpy(ids) if form.is_packed else None,
        is_padding=~is_text if form.with_padding else None,
        sources=_as_rows(placed, _source, form.width, np.int64) if form.with_sources else None,
        mtp=tuple(_targets(pieces, form) for pieces in ahead.values()),
        extras={name: _as_rows(placed, partial(_extra, name), form.width, np.float32) for name in form.extras},
        choices={
            name: _as_rows(placed, partial(_choice, name, shape), form.width, np.int32, shape, filler=-1)
            for name, shape in form.choices.items()
        },
        images=images,
        num_sequences=num_sequences,
        num_padding_tokens=is_text.numel() - int(is_text.sum()),
        # by weights, not by the mask, since a sample of weight 0 has no loss tokens
        num_loss_tokens=sum(int(np.count_nonzero(sample.weights)) for sample in main),
        num_pairs=int(num_visible.sum()) + num_ahead,
        num_window_pairs=int(np.minimum(num_visible, form.width if form.window is None else form.window).sum())
        + num_ahead,
        num_output_rows=num_output_rows,
    )


_TOKENS, _LABELS, _IS_TEXT = attrgetter("sample.tokens"), attrgetter("sample.labels"), attrgetter("is_text")
_WEIGHTS, _SHARES = attrgetter("weights"), attrgetter("denominator_weights")


def _extra(name: str, piece: _PlacedSample) -> NDArray[np.float32]:
    return piece.sample.extras[name]


def _choice(name: str, shape: tuple[int, int], piece: _PlacedSample) -> NDArray[np.int32]:
    """Returns the choices of a sample, [n, layers, k]; -1 if it prescribes none."""
    nothing = np.broadcast_to(np.int32(-1), (piece.sample.width, *shape))
    return piece.sample.choices.get(name, nothing)


def _source(piece: _PlacedSample) -> NDArray[np.int64]:
    return np.full(piece.sample.width, -1 if piece.sample.source is None else piece.sample.source)


def _images(
    placed: Sequence[Sequence[_PlacedSample]], positions: Tensor, starts: NDArray[np.int32], form: RowForm
) -> MicrobatchImages | None:
    """Joins the images of a microbatch, with the places of features that MTP depths read; `positions` and `starts` are
    [rows, width]."""
    rows = [[(piece.sample.images, piece.sample.width) for piece in row] for row in placed]
    images = joined_images(rows, positions, form.patches_per_feature, form.bidirectional_images)
    if images is None or form.num_predictions == 1:
        return images
    return replace(images, ahead=_places_ahead(images.places, starts, form.num_predictions - 1))


def joined_images(
    rows: Sequence[Sequence[tuple[SampleImages | None, int]]],
    positions: Tensor,
    patches_per_feature: int | None,
    is_bidirectional: bool = False,
) -> MicrobatchImages | None:
    """Joins the images of all samples; None if no sample has any.

    Args:
        rows: Images and width of each sample of each row.
        positions: Rotary positions of text, [rows, width] int64 on the CPU; samples with images have their own.
        patches_per_feature: Number of patches that become one feature; None for a model without a tower.
        is_bidirectional: Whether tokens of an image see each other both ways.
    """
    found = [images for row in rows for images, _ in row if images is not None]
    if not found:
        return None
    if patches_per_feature is None:
        raise DataError("a sample has images, but the model reads text; set model.vision, or leave the images out")
    # tokens of text have one position on all axes
    places, axes = torch.full_like(positions, -1), positions.unsqueeze(-1).repeat(1, 1, 3)
    ends = torch.arange(1, positions.shape[1] + 1, dtype=torch.int32).repeat(len(rows), 1)
    num_features = 0
    for row, pieces in enumerate(rows):
        begin = 0
        for images, width in pieces:
            place = slice(begin, begin + width)
            begin = place.stop
            if images is not None:
                own = torch.from_numpy(images.places)
                places[row, place] = torch.where(own < 0, own, own + num_features)
                axes[row, place] = torch.from_numpy(images.axes)
                if is_bidirectional:
                    ends[row, place] += _features_left(images, patches_per_feature)
                num_features += len(images.pixels) // patches_per_feature
    pixels, grids = (np.concatenate([getattr(images, name) for images in found]) for name in ("pixels", "grids"))
    of_rows = (places, axes, ends if is_bidirectional else None)
    return MicrobatchImages(torch.from_numpy(pixels), torch.from_numpy(grids), *of_rows)


def _places_ahead(places: Tensor, starts: NDArray[np.int32], num_depths: int) -> Tensor:
    """Returns the feature of the token that each MTP depth reads, [rows, width, depths]; -1 for text, and beyond the
    end of a document. `starts` has the index at which each token's document begins, [rows, width]."""
    rows = list(zip(places.numpy() + 1, starts, strict=True))
    depths = [[values_ahead(row, begins, depth) for row, begins in rows] for depth in range(1, num_depths + 1)]
    return torch.from_numpy(np.stack(depths, axis=-1) - 1)


def _features_left(images: SampleImages, patches_per_feature: int) -> Tensor:
    """Returns the number of features that follow each token's own in its image, [n]; 0 for text."""
    ends = np.cumsum(images.grids.prod(axis=1) // patches_per_feature)
    last = ends[np.searchsorted(ends, images.places, side="right")] - 1
    return torch.from_numpy(np.where(images.places < 0, 0, last - images.places))


def _num_ahead(images: MicrobatchImages | None) -> int:
    """Counts the pairs of a token and a later one that it sees."""
    if images is None or images.ends is None:
        return 0
    return int((images.ends - torch.arange(1, images.ends.shape[1] + 1)).sum())


def _num_weighed(terms: Iterable[Sequence[Sequence[TokenTerms]]]) -> int:
    """Counts the positions with a weight in some term; a share alone does not count."""
    by_term = [itertools.chain.from_iterable(rows) for rows in terms]
    count = 0
    for terms_of_sample in zip(*by_term):
        count += int(np.any([term.weights != 0 for term in terms_of_sample], axis=0).sum())
    return count


def _piece(sample: Sample, form: RowForm) -> _PlacedSample:
    is_text = np.ones(sample.width, np.bool_)
    if not len(sample.tokens):
        nothing = np.zeros(1, np.int64)
        sample = replace(sample, tokens=nothing, labels=nothing, mask=np.zeros(1), document_starts=None)
        is_text[:] = False
    starts = sample.document_starts if form.isolates_documents else None
    return _PlacedSample(sample, is_text, np.zeros(sample.width, np.int32) if starts is None else starts)


def _ahead(piece: _PlacedSample, depth: int) -> _PlacedSample:
    """Returns the sample as an MTP depth sees it; positions without a token `depth` positions ahead hold no text."""
    starts = piece.document_starts
    return replace(
        piece, sample=mtp_sample(piece.sample, starts, depth), is_text=values_ahead(piece.is_text, starts, depth)
    )


def _targets(rows: Sequence[Sequence[_PlacedSample]], form: RowForm) -> MtpTargets:
    return MtpTargets(
        tokens=_as_rows(rows, _TOKENS, form.width, np.int64),
        labels=_as_rows(rows, _LABELS, form.width, np.int64),
        is_padding=~_as_rows(rows, _IS_TEXT, form.width, np.bool_) if form.with_padding else None,
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
            weight = 1.0  # the preference loss weighs groups
        elif sample.member.role != "chosen":
            mask = np.zeros_like(mask)
    return aggregate(mask, weight, term, is_first_in_step)


def _document_starts(rows: Sequence[Sequence[_PlacedSample]], form: RowForm) -> NDArray[np.int32]:
    """Returns the index in the row at which the document of each position begins, [rows, width]."""
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
    """Returns the number in the microbatch of each position's sequence, [rows, width], and the number of sequences.

    Padding belongs to the last sample of its row. A row without samples is a sequence without text.
    """
    ids, count = np.zeros((len(rows), width), np.int64), 0
    for row, pieces in zip(ids, rows):
        widths = [piece.sample.width for piece in pieces] or [width]
        numbers = np.repeat(np.arange(count, count + len(widths)), widths)
        row[: len(numbers)], row[len(numbers) :] = numbers, numbers[-1]
        count += len(widths)
    return ids, count


def _as_rows(
    rows: Sequence[Sequence[Any]],
    values_of: Callable[[Any], NDArray[Any]],
    width: int,
    dtype: type[np.generic],
    shape: tuple[int, ...] = (),
    filler: int = 0,
) -> Tensor:
    """Returns [rows, width, *shape]: the values of the parts of each row, concatenated and followed by the filler."""
    values = np.full((len(rows), width, *shape), filler, dtype)
    for row, parts in zip(values, rows):
        if parts:
            joined = np.concatenate([values_of(part) for part in parts])
            row[: len(joined)] = joined
    return torch.from_numpy(values)


Value = TypeVar("Value", np.int64, np.float64, np.bool_)


def mtp_sample(sample: Sample, document_starts: NDArray[np.int32], depth: int) -> Sample:
    """Returns tokens, labels and mask of a whole row `depth` positions ahead, as in `values_ahead`."""
    return Sample(
        tokens=values_ahead(sample.tokens, document_starts, depth),
        labels=values_ahead(sample.labels, document_starts, depth),
        mask=values_ahead(sample.mask, document_starts, depth),
        weight=sample.weight,
    )


def values_ahead(values: NDArray[Value], document_starts: NDArray[np.int32], depth: int) -> NDArray[Value]:
    """Returns for each position the value `depth` positions ahead in the same document, [seq]; 0 beyond its end.

    `document_starts` has the index at which each token's document begins, [seq].
    """
    ahead = np.zeros_like(values)
    ahead[:-depth] = np.where(document_starts[depth:] == document_starts[:-depth], values[depth:], values.dtype.type(0))
    return ahead
