"""Best-fit-decreasing over groups of equal lengths.

The longest sample comes first, and each goes into the fullest row that still takes it. Samples of equal length and rows
of equal content are handled together, so the cost follows from how many lengths differ, not from how many samples there
are; the rows are those of the rule applied sample by sample, where of equally full rows the last one changed is taken.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PackedRows(NamedTuple):
    """Samples in rows."""

    samples: NDArray[np.int64]
    """[num_samples]: row after row, each with its longest sample first."""
    ends: NDArray[np.int64]
    """[num_rows]: where each row ends in `samples`."""

    def row(self, number: int) -> tuple[int, ...]:
        """The samples of one row."""
        start = int(self.ends[number - 1]) if number else 0
        return tuple(self.samples[start : int(self.ends[number])].tolist())


class _Group(NamedTuple):
    """Rows of equal content."""

    content: tuple[tuple[int, int], ...]
    """Length, and how many samples of it, decreasing."""
    num_rows: int


def packed(lengths: NDArray[np.int64], row_width: int) -> PackedRows:
    """Puts samples into as few rows as best-fit-decreasing finds; the same on every machine.

    Args:
        lengths: [num_samples] positions that each takes, 1 to row_width.
        row_width: Positions of a row.
    """
    counts = np.bincount(lengths, minlength=row_width + 1)
    return _filled(_groups(counts, row_width), counts, _longest_first(lengths))


def _groups(counts: NDArray[np.int64], row_width: int) -> list[_Group]:
    """Which lengths lie together.

    Args:
        counts: [row_width + 1] samples of each length.
        row_width: Positions of a row.
    """
    # of each number of free positions the rows that have so many; the set bits of `free` say where there are any
    waiting: dict[int, list[_Group]] = {}
    free, full = 0, []
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            if fitting := free >> length:
                space = length + (fitting & -fitting).bit_length() - 1
                content, num_rows = waiting[space].pop()
            else:
                # a new row for every sample that is left, as far as they do not share one
                space, content, num_rows = row_width, (), left
            # the fullest row that takes a sample takes the next one too, until it is too full
            repeats = min(space // length, left)
            used = min(num_rows, left // repeats)
            left -= used * repeats
            if fitting:
                if used < num_rows:
                    waiting[space].append(_Group(content, num_rows - used))
                elif not waiting[space]:
                    free ^= 1 << space
            group = _Group((*content, (length, repeats)), used)
            space -= length * repeats
            if space:
                waiting.setdefault(space, []).append(group)
                free |= 1 << space
            else:
                full.append(group)
    return full + [group for space in sorted(waiting) for group in waiting[space]]


def _longest_first(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """[num_samples]: samples by decreasing length, those of equal length in their order."""
    # numpy sorts 16-bit numbers by radix, in linear time
    descending = (lengths.max(initial=0) - lengths).astype(np.uint32)
    order = np.argsort((descending & 0xFFFF).astype(np.uint16), kind="stable")
    if lengths.max(initial=0) >> 16:
        order = order[np.argsort((descending >> 16).astype(np.uint16)[order], kind="stable")]
    return order


def _filled(groups: list[_Group], counts: NDArray[np.int64], longest_first: NDArray[np.int64]) -> PackedRows:
    """Rows of samples from rows of lengths."""
    # where the next sample of each length lies: the longer ones come before it
    following = (len(longest_first) - np.cumsum(counts)).tolist()
    row_sizes = [sum(repeats for _, repeats in content) for content, _ in groups]
    ends = np.cumsum(np.repeat(np.array(row_sizes, np.int64), [num_rows for _, num_rows in groups]))
    samples = np.empty(len(longest_first), np.int64)
    start = 0
    for (content, num_rows), row_size in zip(groups, row_sizes):
        block = samples[start : start + num_rows * row_size].reshape(num_rows, row_size)
        column = 0
        for length, repeats in content:
            taken = following[length] + num_rows * repeats
            block[:, column : column + repeats] = longest_first[following[length] : taken].reshape(num_rows, repeats)
            following[length], column = taken, column + repeats
        start += num_rows * row_size
    return PackedRows(samples, ends)
