"""Best-fit-decreasing over groups of equal lengths.

The longest sample comes first, and each goes into the fullest row with room for it. Samples of equal length and rows of
equal content are handled together, so the cost depends on the number of different lengths, not of samples. The rows are
those of the rule applied sample by sample, taking the last changed of equally full rows.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_WORD_BITS = 9
_WORD_MASK = (1 << _WORD_BITS) - 1


class PackedRows(NamedTuple):
    samples: NDArray[np.int64]
    """[num_samples]: row after row, each with its longest sample first."""
    ends: NDArray[np.int64]
    """[num_rows]: where each row ends in `samples`."""

    def of(self, row: int) -> NDArray[np.int64]:
        return self.samples[int(self.ends[row - 1]) if row else 0 : int(self.ends[row])]


_Group = tuple[tuple[int, ...], int]
"""Rows of equal content: (length, samples of it, next smaller length, ...) and the number of rows. Plain tuples of
numbers are not followed by the garbage collector; other types would take a third of the time."""


class _Numbers:
    """A set of numbers that finds its smallest element from a bound on.

    Two levels of bits: a single integer would be copied whole at every step, 16 KiB for rows of 128k positions.
    """

    def __init__(self, largest: int) -> None:
        self._words = [0] * ((largest >> _WORD_BITS) + 1)
        self._used = 0
        """Bits of the words that are not 0."""

    def add(self, number: int) -> None:
        self._words[number >> _WORD_BITS] |= 1 << (number & _WORD_MASK)
        self._used |= 1 << (number >> _WORD_BITS)

    def remove(self, number: int) -> None:
        word = number >> _WORD_BITS
        self._words[word] ^= 1 << (number & _WORD_MASK)
        if not self._words[word]:
            self._used ^= 1 << word

    def smallest_from(self, bound: int) -> int | None:
        """Returns the smallest number that is at least `bound`; None if there is none."""
        word = bound >> _WORD_BITS
        if rest := self._words[word] >> (bound & _WORD_MASK):
            return bound + (rest & -rest).bit_length() - 1
        if later := self._used >> (word + 1):
            word += (later & -later).bit_length()
            bits = self._words[word]
            return (word << _WORD_BITS) + (bits & -bits).bit_length() - 1
        return None


def packed(lengths: NDArray[np.int64], row_width: int) -> PackedRows:
    """Puts samples into as few rows as best-fit-decreasing finds; the same on every machine.

    Args:
        lengths: [num_samples] positions that each takes, 1 to row_width.
    """
    assert lengths.max(initial=0) <= row_width, "a sample that is longer than a row is refused before"
    counts = np.bincount(lengths, minlength=row_width + 1)
    return _filled(_groups(counts, row_width), counts, _longest_first(lengths))


def _groups(counts: NDArray[np.int64], row_width: int) -> list[_Group]:
    """Finds which lengths share a row; `counts` is [row_width + 1] samples of each length."""
    # for each number of free positions, the rows that have as many; `spaces` holds the numbers that occur
    waiting: dict[int, list[_Group]] = {}
    spaces = _Numbers(row_width)
    full: list[_Group] = []
    empty: tuple[int, ...] = ()
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            space = spaces.smallest_from(length)
            if space is None:
                # a new row for every sample that is left, unless several share one
                space, of_space, content, num_rows = row_width, None, empty, left
            else:
                of_space = waiting[space]
                content, num_rows = of_space.pop()
            # the fullest row that takes a sample takes the next one too, until it is too full
            repeats = min(space // length, left)
            used = min(num_rows, left // repeats)
            left -= used * repeats
            if of_space is not None:
                if used < num_rows:
                    of_space.append((content, num_rows - used))
                elif not of_space:
                    spaces.remove(space)
            group = ((*content, length, repeats), used)
            space -= length * repeats
            if space:
                waiting.setdefault(space, []).append(group)
                spaces.add(space)
            else:
                full.append(group)
    return full + [group for space in sorted(waiting) for group in waiting[space]]


def _longest_first(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [num_samples]: samples by decreasing length, equally long ones in order."""
    # numpy sorts 16-bit numbers by radix, in linear time
    descending = (lengths.max(initial=0) - lengths).astype(np.uint32)
    order = np.argsort((descending & 0xFFFF).astype(np.uint16), kind="stable")
    if lengths.max(initial=0) >> 16:
        order = order[np.argsort((descending >> 16).astype(np.uint16)[order], kind="stable")]
    return order


def _filled(groups: list[_Group], counts: NDArray[np.int64], longest_first: NDArray[np.int64]) -> PackedRows:
    """Turns rows of lengths into rows of samples."""
    # index of the next sample of each length: longer ones come before it
    following = (len(longest_first) - np.cumsum(counts)).tolist()
    row_sizes = [sum(content[1::2]) for content, _ in groups]
    ends = np.cumsum(np.repeat(np.array(row_sizes, np.int64), [num_rows for _, num_rows in groups]))
    samples = np.empty(len(longest_first), np.int64)
    start = 0
    for (content, num_rows), row_size in zip(groups, row_sizes):
        stop = start + num_rows * row_size
        block = samples[start:stop].reshape(num_rows, row_size)
        column = 0
        for length, repeats in zip(content[::2], content[1::2]):
            first = following[length]
            following[length] = first + num_rows * repeats
            taken = longest_first[first : following[length]]
            block[:, column : column + repeats] = taken if num_rows == 1 else taken.reshape(num_rows, repeats)
            column += repeats
        start = stop
    return PackedRows(samples, ends)
