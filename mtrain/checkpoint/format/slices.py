"""Ranges of a flattened tensor as slices of the tensor.

A distributed optimizer cuts parameters wherever its flat buffer is cut. Such a range of elements is a few slices: the
end of a first row, whole rows, the beginning of a last row, and so on inwards. Sharded checkpoints consist of slices,
so each rank can write its own range without gathering whole tensors first.
"""

import math
from collections.abc import Iterator, Sequence

from mtrain.base.tensor_slice import TensorSlice


def slices_of_run(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[int, TensorSlice]]:
    """Yields the fewest slices, in order, that make up elements [start, end) of a row-major tensor.

    Args:
        shape: Shape of the tensor; at most 2 x len(shape) - 1 slices result, and none where the range is empty.
        start: First element.
        end: Index after the last element.

    Yields:
        First element of the slice, counted in the flattened tensor, and the slice.
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
        # the range begins and ends inside one row, so there is no whole row between
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
