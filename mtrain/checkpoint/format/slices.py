"""Runs of a flattened tensor as boxes of the tensor.

A distributed optimizer cuts parameters wherever its flat buffer is cut. Such a run of elements is a few boxes: the end
of a first row, whole rows, the beginning of a last row, and so on inwards. Boxes are what sharded checkpoints consist
of, so each rank can write its own run without bringing whole tensors together first.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """Consecutive elements that are a box, too."""

    start: int
    """First element, counted in the flattened tensor."""
    offset: tuple[int, ...]
    """Of the box in the tensor."""
    sizes: tuple[int, ...]

    @property
    def end(self) -> int:
        """One behind the last element."""
        return self.start + math.prod(self.sizes)


def slices_of_run(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The fewest boxes, in order, that make up elements [start, end) of a row-major tensor.

    Args:
        shape: Of the tensor; at most 2 x len(shape) - 1 boxes result, and none where the run is empty.
        start: First element.
        end: One behind the last element.
    """
    assert 0 <= start <= end <= math.prod(shape), (shape, start, end)
    if start == end:
        return
    if not shape:
        yield Box(0, (), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows [first, last)
    if first > last:  # within one row
        yield from _in_row(shape, last, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box(first * row, (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: Sequence[int], number: int, start: int, end: int) -> Iterator[Box]:
    row = math.prod(shape[1:])
    for box in slices_of_run(shape[1:], start - number * row, end - number * row) if start < end else ():
        yield Box(box.start + number * row, (number, *box.offset), (1, *box.sizes))
