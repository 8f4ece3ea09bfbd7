"""Samples of finetuning: one sequence for the loss each, read from the token cache.

The encoder interprets records (`mtrain.data.encoding`); this module cuts their tokens to the length of a row. A sample
fits if it has at most seq_length + 1 tokens, as the last one is only predicted; `too_long` says what happens to longer
ones.

A record counts as one sequence. If `too_long` is split, each piece counts as one, with the weight of its record: it is
a sample of the global batch like any other, with the length of its own mask, and is in the same step as other pieces of
its record only by chance. The cuts depend on data.seq_length alone, never on the layout or on packing. A sample without
anything to learn is an empty sequence (loss.empty_sequences).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.config.extras import ROUTED_EXPERTS, choice_columns
from mtrain.core.batch.sample import EncodedImage, Sample, TokenizedSample, shifted, with_label
from mtrain.data.cache.entry import TokenCache
from mtrain.data.formats.recognise import FileKind
from mtrain.data.samples.images import encoded_images, outside, spans, split, with_images
from mtrain.hf.images import ImageProcessor

TooLong = Literal["end", "start", "drop", "refuse", "split"]


class RowLimit(NamedTuple):
    """Longest sequence that fits into a row, and the treatment of longer ones."""

    seq_length: int
    too_long: TooLong
    """Treatment of sequences of more than seq_length + 1 tokens."""
    images: ImageProcessor | None = None
    """Processor of images, which are never cut; None for a model that reads only text."""


@dataclass(frozen=True)
class Pieces:
    """Parts of tokenised samples, each a sequence for the loss; arrays are [n]."""

    samples: NDArray[np.int64]
    """Number of the sample in the cache."""
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    """Number of tokens, at most seq_length + 1: the last one is only predicted."""

    def __len__(self) -> int:
        return len(self.samples)

    def only(self, chosen: NDArray[np.bool_]) -> Pieces:
        return Pieces(self.samples[chosen], self.starts[chosen], self.sizes[chosen])


@dataclass(frozen=True)
class TooLongCounts:
    """Losses from samples that are longer than a row."""

    samples: int = 0
    """Number of samples that are longer than a row."""
    lost_tokens: int = 0
    """Tokens of these samples that are in no row."""
    pieces: int = 0
    """Pieces into which split cuts them."""
    empty: int = 0
    """Pieces with nothing left to learn; split leaves them out."""


def pieces_of(
    cache: TokenCache, numbers: range, seq_length: int, too_long: TooLong, images: ImageProcessor | None = None
) -> tuple[Pieces, TooLongCounts]:
    """Cuts samples into the pieces to train. Pieces of a split sample overlap by one token, so that each of its tokens
    but the first is predicted once; those without a token to learn are left out. No cut is inside an image."""
    lengths = _usable_lengths(cache, numbers, images)
    most = seq_length + 1
    is_long = lengths > most
    samples = np.arange(numbers.start, numbers.stop)
    whole = Pieces(samples, np.zeros_like(samples), np.minimum(lengths, most))
    if not is_long.any():
        return whole, TooLongCounts()
    count = int(is_long.sum())
    shown = {}
    if images is not None and cache.images is not None:
        shown = {index: spans(cache, numbers.start + index, images) for index in map(int, np.flatnonzero(is_long))}
    match too_long:
        case "end" | "start":
            for index, places in shown.items():
                if too_long == "end":
                    whole.sizes[index] = outside(places, seq_length, "earlier") + 1
                else:
                    whole.sizes[index] = lengths[index] - outside(places, int(lengths[index]) - most, "later")
            cut = whole if too_long == "end" else Pieces(samples, lengths - whole.sizes, whole.sizes)
            lost = int((lengths - cut.sizes)[is_long].sum())
            return cut, TooLongCounts(count, lost, empty=_num_empty(cache, cut.only(is_long)))
        case "drop":
            return whole.only(~is_long), TooLongCounts(count, int(lengths[is_long].sum()))
        case "refuse":
            first = int(np.argmax(is_long))
            number = numbers.start + first
            smaller = "lower data.images.max_pixels, " if len(shown.get(first, ())) else ""
            raise DataError(
                f"{cache.location(number)}: has {counted(cache.lengths[number], 'token')}, but "
                f"data.seq_length={seq_length} takes {most} ({count} of {counted(len(samples), 'sample')} "
                f"{'is' if count == 1 else 'are'} longer); raise it, {smaller}shorten them, or set data.too_long to "
                "end, start, split or drop"
            )
        case "split":
            pieces = _split_around(cache, samples, lengths, _split(samples, lengths, seq_length), seq_length, shown)
            is_empty = is_long[pieces.samples - numbers.start] & (num_trained(cache, pieces) == 0)
            split = int(is_long[pieces.samples - numbers.start].sum())
            return pieces.only(~is_empty), TooLongCounts(count, 0, split, int(is_empty.sum()))
        case _:
            assert_never(too_long)


def _usable_lengths(cache: TokenCache, numbers: range, images: ImageProcessor | None) -> NDArray[np.int64]:
    """Returns the lengths of samples, without an image at the end: its last token is only predicted, so a row cannot
    hold the image whole, and no token in the loss follows it."""
    lengths = cache.lengths[numbers.start : numbers.stop]
    if images is None or cache.images is None:
        return lengths
    for index in map(int, np.flatnonzero(cache.last_ids(numbers) == images.image_token)):
        places = spans(cache, numbers.start + index, images)
        lengths[index] = outside(places, int(lengths[index]) - 1, "earlier") + 1
    return lengths


def num_trained(cache: TokenCache, pieces: Pieces) -> NDArray[np.int64]:
    """Returns [n]: tokens of each piece in the loss; its first one is not predicted."""
    first = cache.starts[pieces.samples] + pieces.starts
    return cache.trained_before(first + pieces.sizes) - cache.trained_before(first + 1)


def _split(samples: NDArray[np.int64], lengths: NDArray[np.int64], seq_length: int) -> Pieces:
    # windows overlap by one token, as in running text (samples/pretrain.py)
    counts = np.maximum(1, -(-(lengths - 1) // seq_length))
    ends = np.cumsum(counts)
    turn = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    starts = turn * seq_length
    return Pieces(np.repeat(samples, counts), starts, np.minimum(np.repeat(lengths, counts) - starts, seq_length + 1))


def _split_around(
    cache: TokenCache,
    samples: NDArray[np.int64],
    lengths: NDArray[np.int64],
    pieces: Pieces,
    seq_length: int,
    shown: Mapping[int, NDArray[np.int64]],
) -> Pieces:
    """Splits the samples with images again, so that no cut is inside an image.

    Args:
        shown: Spans of each sample's images, by index in `samples`.
    """
    anew = [index for index, places in shown.items() if len(places)]
    if not anew:
        return pieces
    kept = pieces.only(~np.isin(pieces.samples, samples[anew]))
    rows = []
    for index, number in zip(anew, samples[anew].tolist()):
        try:
            rows += [(number, *piece) for piece in split(shown[index], int(lengths[index]), seq_length)]
        except DataError as fault:
            raise DataError(f"{cache.location(number)}: {fault}") from None
    joined = [np.concatenate([old, new]) for old, new in zip((kept.samples, kept.starts, kept.sizes), np.array(rows).T)]
    order = np.lexsort((joined[1], joined[0]))
    return Pieces(*(values[order] for values in joined))


def _num_empty(cache: TokenCache, pieces: Pieces) -> int:
    return int((num_trained(cache, pieces) == 0).sum())


def why_nothing(cache: TokenCache, pieces: Pieces, is_judged: bool = False) -> str | None:
    """Explains, with counts, why no piece has a token to learn; None if one has.

    A record without a token to learn is not a sample, so a piece loses all of them only to its record's weight or to a
    cut.

    Args:
        is_judged: Whether a label in the loss follows the last token, which no cut removes.
    """
    weighs: NDArray[np.bool_] = cache.weights[pieces.samples] != 0
    is_whole: NDArray[np.bool_] = pieces.sizes == cache.lengths[pieces.samples]
    if (weighs & (is_whole | is_judged)).any():
        return None
    cut = pieces.only(weighs)
    if len(cut) and num_trained(cache, cut).any():
        return None
    lost, num_lost = "loses all its" if len(cut) == 1 else "lose all their", len(cut)
    weightless = len(pieces) - num_lost
    reasons = {f"{'has' if weightless == 1 else 'have'} weight 0": weightless, f"{lost} loss tokens by a cut": num_lost}
    parts = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
    return f"of {counted(len(pieces), 'sequence', ',')} {' and '.join(parts)}"


_NAMES_OF_0_1_0: dict[TooLong, str] = {"end": "truncate", "drop": "drop", "refuse": "refuse"}


def sample_of_record(record: TokenizedSample, start: int, end: int, extras: Sequence[str] = ()) -> Sample:
    """Builds a sample from the tokens `start` to before `end` of a record."""
    columns: dict[str, NDArray[np.float32] | float] = {}
    choices: dict[str, NDArray[np.int32]] = {}
    if extras:
        assert record.extras is not None, "the cache has these extras"
        experts, shape = choice_columns(extras)
        side_columns = {*range(len(extras))} - {*experts}
        columns = {extras[column]: record.extras[start + 1 : end, column] for column in sorted(side_columns)}
        if experts:
            # experts belong to the input token, other extras to the predicted one; a single token is padding
            rows = record.extras[start : end - 1, experts] if end - start > 1 else np.full((1, len(experts)), -1)
            choices[ROUTED_EXPERTS] = rows.reshape(-1, *shape).astype(np.int32)
    sample = shifted(
        record.ids[start:end].astype(np.int64),
        # position t predicts token t + 1, so the weight of the first token is not used
        record.loss_weights[start + 1 : end].astype(np.float64),
        weight=record.weight,
        extras=columns,
    )
    return replace(sample, choices=choices)


class SftDataset:
    def __init__(
        self, cache: TokenCache, numbers: range, limit: RowLimit, extras: Sequence[str] = (), is_judged: bool = False
    ) -> None:
        """Args:
        numbers: Numbers of the samples that are used, counted from 0.
        extras: Values that the cache has for each token in addition to its weight."""
        self._seq_length, self._too_long, self._images = seq_length, too_long, images = limit
        self.cache, self._numbers, self._extras, self._is_judged = cache, numbers, tuple(extras), is_judged
        self._pieces: Pieces
        self._pieces, self.too_long = pieces_of(cache, numbers, seq_length, too_long, images)
        if not len(self._pieces):
            lost = f"{self.too_long.samples} were left out as longer than {counted(seq_length + 1, 'token')}"
            raise DataError(
                f"{cache.files[0].path}: samples {numbers.start + 1} to {numbers.stop} have nothing to train on "
                f"({lost}); give more of them, another data.split or a larger data.seq_length"
            )
        self.fingerprint = f"{cache.fingerprint}-{numbers.start}-{numbers.stop}-{seq_length}-{too_long}"
        if cache.images is not None and images is not None:
            self.fingerprint += f"-{images.fingerprint}"

    def __len__(self) -> int:
        return len(self._pieces)

    def sample(self, epoch: int, index: int) -> Sample:
        """Returns a sample; the same in every epoch."""
        record, start, end = self._piece(index)
        if self._is_judged and end < len(record.ids):
            record = with_label(record, end)
        sample = sample_of_record(record, start, end, self._extras)
        return with_images(sample, record, start, end, self._images, self.location(index))

    def images(self, index: int) -> tuple[EncodedImage, ...]:
        """Returns the images of a sample as they are stored, for display."""
        return () if self._images is None else encoded_images(*self._piece(index), self._images)

    def _piece(self, index: int) -> tuple[TokenizedSample, int, int]:
        """Returns the record of a sample, and the sample's first token and end in it."""
        start = int(self._pieces.starts[index])
        return self.cache.read(int(self._pieces.samples[index])), start, start + int(self._pieces.sizes[index])

    def widths(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [n]: positions that samples take in rows, at least 1, without reading them."""
        return np.maximum(1, self._pieces.sizes[indices].astype(np.int64) - 1)

    def why_nothing(self) -> str | None:
        """Explains, with counts, why no sample has anything to learn; None if one has."""
        return why_nothing(self.cache, self._pieces, self._is_judged)

    def location(self, index: int) -> str:
        return self.cache.location(int(self._pieces.samples[index]))

    def fingerprint_of_0_1_0(self, tokenizer: str) -> str | None:
        """Returns the fingerprint that version 0.1.0 gave these data; None if it could not read them."""
        (file, *more_files) = self.cache.files
        old = _NAMES_OF_0_1_0.get(self._too_long)
        if more_files or file.kind is not FileKind.LINES or old is None or self.cache.num_bad:
            return None
        part = f"{self._numbers.start}-{self._numbers.stop}"
        return f"{self.cache.file_digests[0]}-{tokenizer}-{part}-{self._seq_length}-{old}"

    def notes(self) -> Iterator[str]:
        """Yields lines for the user on samples that are changed before training."""
        lost, path = self.too_long, self.cache.files[0].path
        if not lost.samples:
            return
        tokens = (
            f"{lost.samples:,} of {counted(len(self._numbers), 'sample', ',')} "
            f"{'has' if lost.samples == 1 else 'have'} more than {counted(self._seq_length + 1, 'token')}"
        )
        match self._too_long:
            case "end" | "start":
                what = f"cut at the {self._too_long} by {counted(lost.lost_tokens, 'token', ',')} in all"
            case "drop":
                what = f"left out, with {counted(lost.lost_tokens, 'token', ',')}"
            case "split":
                what = f"split into {counted(lost.pieces, 'piece', ',')}"
            case "refuse":
                raise AssertionError("refused when they were found")
            case _:
                assert_never(self._too_long)
        empty = f"; in {lost.empty:,} no token is left to train" if lost.empty else ""
        yield f"{path}: {tokens}: {what}{empty}"
