"""Shapes in words: "(G s d) h" is a matrix whose rows run over groups, slots of a group and dimensions of a head.

Two tensors that hold the same numbers in another order then have the same names in two orders, and a part of a fused
tensor fixes one of the names: the key of each group is slot -2. All changes that a conversion makes to a tensor follow
from the two descriptions, in both directions, so no direction can be mistaken where two sizes happen to be equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from mtrain.base.tensor_slice import Sizes, TensorSlice

if TYPE_CHECKING:
    from torch import Tensor

Fixed: TypeAlias = Mapping[str, int | slice]
"""Axis -> place of a part on it."""
_GROUP = re.compile(r"\(([^)]*)\)|(\S+)")


def groups(axes: str) -> list[list[str]]:
    """Splits a description into the names of the axes in each dimension: "(G s d) h" -> [[G, s, d], [h]]."""
    return [(inner or single).split() for inner, single in _GROUP.findall(axes)]


def shape(axes: str, sizes: Mapping[str, int]) -> Sizes:
    """Returns the shape of a tensor with this description."""
    return tuple(math.prod(sizes[name] for name in group) for group in groups(axes))


class Block(NamedTuple):
    """Two slices with the same numbers in the same order: one of a global tensor, one of a part of it."""

    whole: TensorSlice
    part: TensorSlice


@dataclass(frozen=True)
class _Run:
    """Place of a part along one dimension of the whole: `repeat` stretches of `count`, `step` apart."""

    start: int
    count: int
    step: int
    repeat: int


class Arrangement:
    """Layout of a part on disk, and its place in the whole tensor."""

    def __init__(self, whole: str, part: str, fixed: Fixed, sizes: Mapping[str, int]) -> None:
        """
        Args:
            whole: Axes of the whole tensor.
            part: Axes of the part on disk: those of the whole in any order, without axes on which it has one place.
            fixed: Place of the part on some axes; it covers the others completely.
            sizes: Size of each axis of the whole.
        """
        own = {name: _extent(fixed.get(name, slice(None)), sizes[name]) for group in groups(whole) for name in group}
        on_disk = [name for group in groups(part) for name in group]
        in_order = [name for group in groups(whole) for name in group if name in on_disk]
        # every axis of the part is one of the whole, and none stands there twice
        assert sorted(on_disk) == sorted(set(in_order)), f"{part} of {whole}"
        # an axis that the part lacks must be fixed at one place of the whole
        assert all(len(own[name]) == 1 for name in own if name not in on_disk), f"{part} of {whole}"
        self.shape: Sizes = tuple(math.prod(len(own[name]) for name in group) for group in groups(part))
        """Shape on disk."""
        # one dimension for each name: this is what allows to permute equal sizes by name
        self._unfolded = [len(own[name]) for name in on_disk]
        self._order = [on_disk.index(name) for name in in_order]
        # numbers alone, no tensor: slices for a rank are found without reading a byte
        self._runs = [_run([(own[name], sizes[name]) for name in group]) for group in groups(whole)]

    @property
    def is_reordered(self) -> bool:
        """Says whether the numbers have another order on disk."""
        return self._order != sorted(self._order)

    @property
    def arranged_shape(self) -> Sizes:
        """Returns the shape of the part with the dimensions of the whole."""
        return tuple(run.repeat * run.count for run in self._runs)

    def arranged(self, on_disk: Tensor) -> Tensor:
        """Returns the part with the dimensions and the order of the whole: a view, unless it is reordered."""
        return on_disk.view(self._unfolded).permute(self._order).reshape(self.arranged_shape)

    def on_disk(self, arranged: Tensor) -> Tensor:
        """Returns the part as it lies on disk: the inverse of `arranged`."""
        in_order = arranged.reshape([self._unfolded[place] for place in self._order])
        back = sorted(range(len(self._order)), key=self._order.__getitem__)
        return in_order.permute(back).reshape(self.shape)

    def blocks(self) -> Iterator[Block]:
        """Yields the slices of the arranged part, in order."""
        for numbers in product(*(range(run.repeat) for run in self._runs)):
            shape = tuple(run.count for run in self._runs)
            whole = tuple(run.start + number * run.step for run, number in zip(self._runs, numbers))
            part = tuple(number * run.count for run, number in zip(self._runs, numbers))
            yield Block(TensorSlice(whole, shape), TensorSlice(part, shape))


def _extent(where: int | slice, size: int) -> range:
    if isinstance(where, int):
        # -1 : 0 would be an empty slice
        return range(size)[where : where + 1] if where != -1 else range(size)[-1:]
    return range(size)[where]


def _run(axes: list[tuple[range, int]]) -> _Run:
    """Describes one dimension; at most one contiguous stretch of its axes may be restricted."""
    whole = [len(extent) == size for extent, size in axes]
    first = whole.index(False) if False in whole else 0
    # An axis at one place before a cut axis belongs to the same stretch: its place only moves the start.
    inner = first
    while inner < len(axes) and len(axes[inner][0]) == 1 and inner + 1 < len(axes) and not whole[inner + 1]:
        inner += 1
    # after a second cut the stretches would not have equal distances, which `_Run` cannot express
    assert all(whole[inner + 1 :]), "a dimension is cut in two places"
    behind = math.prod(size for _, size in axes[inner + 1 :])
    period = math.prod(size for _, size in axes[first:])
    start = sum(
        axes[place][0].start * math.prod(size for _, size in axes[place + 1 :]) for place in range(first, inner + 1)
    )
    # whole axes before the first cut: the stretch comes once for each index of them
    repeat = math.prod(size for _, size in axes[:first])
    return _Run(start, len(axes[inner][0]) * behind, period, repeat)
