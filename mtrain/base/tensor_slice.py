"""Box-shaped parts of tensors.

A distributed optimizer cuts parameters at any element of its flat buffer. Such a range is a few slices: the end of a
first row, whole rows, the beginning of a last row, and so on for inner axes. Sharded checkpoints consist of slices, so
each rank writes its own range without gathering whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Sizes: TypeAlias = tuple[int, ...]


class TensorSlice(NamedTuple):
    """Range of indices along each axis of a tensor."""

    offset: Sizes
    shape: Sizes
    """Size along each axis; a slice with a 0 is empty."""

    @classmethod
    def whole(cls, shape: Sizes) -> TensorSlice:
        """Returns the slice of a whole tensor with this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """Number of elements in the slice."""
        return math.prod(self.shape)

    def intersect(self, other: TensorSlice) -> TensorSlice | None:
        """Returns the intersection of two slices of a tensor; None if it is empty."""
        begin = tuple(map(max, self.offset, other.offset))
        ends = (min(a + m, b + n) for a, m, b, n in zip(*self, *other, strict=True))
        shape = tuple(end - first for end, first in zip(ends, begin))
        return TensorSlice(begin, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: TensorSlice) -> TensorSlice:
        """Returns the slice with an offset relative to `outer`, which must contain it."""
        return TensorSlice(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the slice of a tensor, [shape], as a view."""
        for axis, (first, size) in enumerate(zip(*self, strict=True)):
            tensor = tensor.narrow(axis, first, size)
        return tensor

    def cut(self, num_elements: int) -> Iterator[TensorSlice]:
        """Yields adjacent slices of about `num_elements` each, along the first axis with more than one index."""
        total = self.num_elements
        if total <= num_elements or not self.shape:
            yield self
            return
        axis = next((number for number, size in enumerate(self.shape) if size > 1), 0)
        rows = max(1, num_elements * self.shape[axis] // total)
        for first in range(0, self.shape[axis], rows):
            offset, shape = list(self.offset), list(self.shape)
            offset[axis] += first
            shape[axis] = min(rows, self.shape[axis] - first)
            yield TensorSlice(tuple(offset), tuple(shape))


def slices_of_run(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[int, TensorSlice]]:
    """Yields the smallest number of slices that make up elements [start, end) of a row-major tensor, in order.

    Args:
        shape: Shape of the tensor; an empty range has no slices, any other at most 2 x len(shape) - 1.
        start: First element.
        end: Index after the last element.

    Yields:
        Index of the slice's first element in the flattened tensor, and the slice.
    """
    assert 0 <= start <= end <= math.prod(shape), (shape, start, end)
    if start == end:
        return
    # a scalar has one element and no axes to cut
    if not shape:
        yield 0, TensorSlice((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows [first, last)
    if first > last:
        # the range begins and ends inside one row
        yield from _in_row(shape, last, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield first * row, TensorSlice((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: Sequence[int], number: int, start: int, end: int) -> Iterator[tuple[int, TensorSlice]]:
    if start >= end:
        return
    before = number * math.prod(shape[1:])
    for first, inner in slices_of_run(shape[1:], start - before, end - before):
        yield first + before, TensorSlice((number, *inner.offset), (1, *inner.shape))
