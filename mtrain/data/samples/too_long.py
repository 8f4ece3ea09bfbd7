"""Treats conversations that are longer than a row; counts what is lost and what can be learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.data.cache.entry import TokenCache

TooLong = Literal["end", "start", "drop", "refuse", "split"]


class RowLimit(NamedTuple):
    """Length up to which a sequence fits into a row, and what happens to longer ones."""

    seq_length: int
    """Positions of a row."""
    too_long: TooLong
    """Treatment of sequences of more than seq_length + 1 tokens."""


@dataclass(frozen=True)
class Pieces:
    """Parts of tokenised samples, each a sequence for the loss; arrays are [n]."""

    samples: NDArray[np.int64]
    """Number of the sample in the cache."""
    starts: NDArray[np.int64]
    """First token of the part."""
    sizes: NDArray[np.int64]
    """Number of tokens, at most seq_length + 1: the last one is only predicted."""

    def __len__(self) -> int:
        return len(self.samples)

    def only(self, chosen: NDArray[np.bool_]) -> Pieces:
        return Pieces(self.samples[chosen], self.starts[chosen], self.sizes[chosen])


@dataclass(frozen=True)
class TooLongCounts:
    """Counts what samples that do not fit have lost."""

    samples: int = 0
    """Samples that are longer than a row."""
    lost_tokens: int = 0
    """Their tokens that no row holds."""
    pieces: int = 0
    """Pieces that they were split into."""
    empty: int = 0
    """Rows cut out of them in which nothing is left to learn; split leaves them out."""


def pieces_of(cache: TokenCache, numbers: range, seq_length: int, too_long: TooLong) -> tuple[Pieces, TooLongCounts]:
    """Cuts samples to the pieces that are trained.

    Pieces of a split sample overlap by one token, so that each of its tokens but the first is predicted once. Pieces
    without a trained token are left out.
    """
    lengths = cache.lengths[numbers.start : numbers.stop]
    most = seq_length + 1
    is_long = lengths > most
    samples = np.arange(numbers.start, numbers.stop)
    whole = Pieces(samples, np.zeros_like(samples), np.minimum(lengths, most))
    if not is_long.any():
        return whole, TooLongCounts()
    count, excess = int(is_long.sum()), int((lengths[is_long] - most).sum())
    match too_long:
        case "end":
            return whole, TooLongCounts(count, excess, empty=_num_empty(cache, whole.only(is_long)))
        case "start":
            late = Pieces(samples, lengths - whole.sizes, whole.sizes)
            return late, TooLongCounts(count, excess, empty=_num_empty(cache, late.only(is_long)))
        case "drop":
            return whole.only(~is_long), TooLongCounts(count, int(lengths[is_long].sum()))
        case "refuse":
            first = numbers.start + int(np.argmax(is_long))
            raise DataError(
                f"{cache.place(first)}: has {cache.lengths[first]} tokens, but data.seq_length={seq_length} takes "
                f"{most} ({count} of {len(samples)} samples are longer); raise it, shorten them, or set data.too_long "
                "to end, start, split or drop"
            )
        case "split":
            pieces = _split(samples, lengths, seq_length)
            is_empty = is_long[pieces.samples - numbers.start] & (num_trained(cache, pieces) == 0)
            split = int(is_long[pieces.samples - numbers.start].sum())
            return pieces.only(~is_empty), TooLongCounts(count, 0, split, int(is_empty.sum()))
        case _:
            assert_never(too_long)


def num_trained(cache: TokenCache, pieces: Pieces) -> NDArray[np.int64]:
    """Returns [n]: tokens of each piece in the loss; its first one is not predicted."""
    first = cache.starts[pieces.samples] + pieces.starts
    return cache.trained_before(first + pieces.sizes) - cache.trained_before(first + 1)


def _split(samples: NDArray[np.int64], lengths: NDArray[np.int64], seq_length: int) -> Pieces:
    # windows overlap by one token, as those of running text do (samples/pretrain.py)
    counts = np.maximum(1, -(-(lengths - 1) // seq_length))
    ends = np.cumsum(counts)
    turn = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    starts = turn * seq_length
    return Pieces(np.repeat(samples, counts), starts, np.minimum(np.repeat(lengths, counts) - starts, seq_length + 1))


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
    reasons = {"count 0 by their weight": len(pieces) - len(cut), "lose all that is in the loss by a cut": len(cut)}
    parts = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
    return f"of {len(pieces):,} sequences {' and '.join(parts)}"
