"""Box-shaped part of a tensor: where it begins and how large it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Sizes: TypeAlias = tuple[int, ...]


class TensorSlice(NamedTuple):
    """Range of indices along each axis of a tensor."""

    offset: Sizes
    """First index along each axis."""
    shape: Sizes
    """Size along each axis, as many axes as `offset`; a slice with a 0 is empty."""

    @classmethod
    def whole(cls, shape: Sizes) -> TensorSlice:
        """Returns the slice that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """Number of elements in the slice."""
        return math.prod(self.shape)

    def intersect(self, other: TensorSlice) -> TensorSlice | None:
        """Returns the part that two slices of one tensor share; None where they share no element."""
        begin = tuple(map(max, self.offset, other.offset))
        ends = (min(a + m, b + n) for a, m, b, n in zip(*self, *other, strict=True))
        shape = tuple(end - first for end, first in zip(ends, begin))
        return TensorSlice(begin, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: TensorSlice) -> TensorSlice:
        """Returns the same elements with an offset relative to `outer`, a slice that holds them."""
        return TensorSlice(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the slice of a tensor, [shape], as a view."""
        for axis, (first, size) in enumerate(zip(*self, strict=True)):
            tensor = tensor.narrow(axis, first, size)
        return tensor

    def cut(self, num_elements: int) -> Iterator[TensorSlice]:
        """Yields adjacent slices of about `num_elements` each, along the first axis that has more than one index."""
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
