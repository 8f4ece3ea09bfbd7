"""Shapes as words: "(G s d) h" is a matrix whose rows run over groups, slots of a group and dimensions of a head.

Two tensors that hold the same numbers in another order are then two orders of the same names, and a fused tensor is a
name that its parts fix: the key of each group is slot -2. Everything that a conversion does to a tensor follows from
the two descriptions, in both directions, so no direction can be mistaken where two sizes happen to be equal.
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
"""Axis -> where on it a part lies."""
_GROUP = re.compile(r"\(([^)]*)\)|(\S+)")


def groups(axes: str) -> list[list[str]]:
    """Names of the axes that each dimension consists of: "(G s d) h" -> [[G, s, d], [h]]."""
    return [(inner or single).split() for inner, single in _GROUP.findall(axes)]


def shape(axes: str, sizes: Mapping[str, int]) -> Sizes:
    """Shape of a tensor that is described so."""
    return tuple(math.prod(sizes[name] for name in group) for group in groups(axes))


class Block(NamedTuple):
    """The same numbers in the same order: a slice of a global tensor and one of a part of it."""

    whole: TensorSlice
    part: TensorSlice


@dataclass(frozen=True)
class _Run:
    """Where a part lies along one dimension of the whole: `repeat` stretches of `count`, `step` apart."""

    start: int
    count: int
    step: int
    repeat: int


class Arrangement:
    """How a part lies on disk and where it lies in the whole tensor."""

    def __init__(self, whole: str, part: str, fixed: Fixed, sizes: Mapping[str, int]) -> None:
        """Args:
        whole: Axes of the whole tensor.
        part: Axes of the part as it lies on disk: those of the whole in any order, without the ones at one place.
        fixed: Where the part lies on some axes; on the others it is everywhere.
        sizes: Size of each axis of the whole.
        """
        own = {name: _extent(fixed.get(name, slice(None)), sizes[name]) for group in groups(whole) for name in group}
        on_disk = [name for group in groups(part) for name in group]
        in_order = [name for group in groups(whole) for name in group if name in on_disk]
        # every axis of the part is one of the whole, and none stands there twice
        assert sorted(on_disk) == sorted(set(in_order)), f"{part} of {whole}"
        # an axis that the part does not have must be one place of the whole
        assert all(len(own[name]) == 1 for name in own if name not in on_disk), f"{part} of {whole}"
        self.shape: Sizes = tuple(math.prod(len(own[name]) for name in group) for group in groups(part))
        """On disk."""
        # one dimension for each name: only so can equal sizes be permuted by name
        self._unfolded = [len(own[name]) for name in on_disk]
        self._order = [on_disk.index(name) for name in in_order]
        # numbers alone, no tensor: slices for a rank follow without reading a byte
        self._runs = [_run([(own[name], sizes[name]) for name in group]) for group in groups(whole)]

    @property
    def is_reordered(self) -> bool:
        """Whether the numbers lie in another order on disk."""
        return self._order != sorted(self._order)

    @property
    def arranged_shape(self) -> Sizes:
        """Of the part with the dimensions of the whole."""
        return tuple(run.repeat * run.count for run in self._runs)

    def arranged(self, on_disk: Tensor) -> Tensor:
        """The part with the dimensions and the order of the whole: a view, unless it is reordered."""
        return on_disk.view(self._unfolded).permute(self._order).reshape(self.arranged_shape)

    def on_disk(self, arranged: Tensor) -> Tensor:
        """The inverse of `arranged`."""
        in_order = arranged.reshape([self._unfolded[place] for place in self._order])
        back = sorted(range(len(self._order)), key=self._order.__getitem__)
        return in_order.permute(back).reshape(self.shape)

    def blocks(self) -> Iterator[Block]:
        """The slices that the arranged part consists of, in order."""
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
    """One dimension; of its axes at most one neighbouring stretch may be restricted."""
    whole = [len(extent) == size for extent, size in axes]
    first = whole.index(False) if False in whole else 0
    # An axis at one place ahead of a cut axis belongs to the same stretch: its place only moves the start.
    inner = first
    while inner < len(axes) and len(axes[inner][0]) == 1 and inner + 1 < len(axes) and not whole[inner + 1]:
        inner += 1
    # behind a second cut the stretches would not lie at equal distances, which `_Run` cannot say
    assert all(whole[inner + 1 :]), "a dimension is cut in two places"
    behind = math.prod(size for _, size in axes[inner + 1 :])
    period = math.prod(size for _, size in axes[first:])
    start = sum(
        axes[place][0].start * math.prod(size for _, size in axes[place + 1 :]) for place in range(first, inner + 1)
    )
    # whole axes before the first cut: the stretch comes once for each index of them
    repeat = math.prod(size for _, size in axes[:first])
    return _Run(start, len(axes[inner][0]) * behind, period, repeat)
