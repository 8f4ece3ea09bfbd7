"""Tables of the Hugging Face tensors that make up each tensor of a checkpoint.

A family is a tuple of rules. A rule names a tensor of a checkpoint, its axes, and its tensors on disk. `{L}` and `{E}`
in a name run over layers and experts, which are axes like any other: identical layers are one tensor of a checkpoint,
whose first axis is L.

Shapes are in words: "(G s d) h" is a matrix whose rows run over groups, slots of a group and dimensions of a head. Two
tensors with the same numbers in another order have the same names in two orders, and a part of a fused tensor fixes one
of the names: the key of each group is slot -2. All changes of a conversion, in both directions, follow from the two
descriptions, so equal sizes cannot be confused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from mtrain.base.tensor_slice import Sizes, TensorSlice
from mtrain.config.schema.model import ModelSection

if TYPE_CHECKING:
    from torch import Tensor

Fixed: TypeAlias = Mapping[str, int | slice]
"""Axis -> position of a part on it."""
Places: TypeAlias = "Fixed | Callable[[Mapping[str, int]], Fixed]"
"""Position of a part, possibly as a function of the sizes of the axes."""
_GROUP = re.compile(r"\(([^)]*)\)|(\S+)")


def groups(axes: str) -> list[list[str]]:
    """Splits a description into the axes of each dimension: "(G s d) h" -> [[G, s, d], [h]]."""
    return [(inner or single).split() for inner, single in _GROUP.findall(axes)]


def shape(axes: str, sizes: Mapping[str, int]) -> Sizes:
    """Returns the shape of a tensor with this description."""
    return tuple(math.prod(sizes[name] for name in group) for group in groups(axes))


def stretch(axis: str, rows: Mapping[str, str], first: str, last: str = "") -> Callable[[Mapping[str, int]], Fixed]:
    """Builds the position of the rows from one kind to another.

    Args:
        rows: Kinds in the order of the axis -> axes, as words, whose product is their number.
    """
    kinds = list(rows)

    def place(sizes: Mapping[str, int]) -> Fixed:
        ends = [0, *accumulate(math.prod(sizes[name] for name in words.split()) for words in rows.values())]
        return {axis: slice(ends[kinds.index(first)], ends[kinds.index(last or first) + 1])}

    return place


class Block(NamedTuple):
    """Two slices with the same numbers in the same order: one of a global tensor, one of a part of it."""

    whole: TensorSlice
    part: TensorSlice


@dataclass(frozen=True)
class _Run:
    """Position of a part along one dimension of the whole: `repeat` stretches of `count`, `step` apart."""

    start: int
    count: int
    step: int
    repeat: int


class Arrangement:
    """Layout of a part on disk, and its position in the whole tensor."""

    def __init__(self, whole: str, part: str, fixed: Fixed, sizes: Mapping[str, int]) -> None:
        """
        Args:
            whole: Axes of the whole tensor.
            part: Axes of the part on disk: those of the whole in any order, without fixed single positions.
            fixed: Position of the part on some axes; it covers the others completely.
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
        """Whether the numbers have another order on disk."""
        return self._order != sorted(self._order)

    @property
    def arranged_shape(self) -> Sizes:
        """Shape of the part with the dimensions of the whole."""
        return tuple(run.repeat * run.count for run in self._runs)

    def arranged(self, on_disk: Tensor) -> Tensor:
        """Returns the part with the dimensions and order of the whole: a view, unless reordered."""
        return on_disk.view(self._unfolded).permute(self._order).reshape(self.arranged_shape)

    def on_disk(self, arranged: Tensor) -> Tensor:
        """Inverts `arranged`."""
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


class JoinedArrangement:
    """Layout of a tensor on disk that joins the rows of parts in its own order; like `Arrangement`."""

    is_reordered = True

    def __init__(self, region: Arrangement, inner: TensorSlice, pieces: Sequence[Arrangement]) -> None:
        """
        Args:
            region: Position of the tensor, in the order of the whole.
            inner: Slice that the pieces fill together, in their terms.
            pieces: Parts in the order of the disk.
        """
        self._region, self._inner, self._pieces = region, inner, pieces
        ends = list(accumulate(piece.shape[0] for piece in pieces))
        self._rows = [slice(end - piece.shape[0], end) for piece, end in zip(pieces, ends, strict=True)]
        self.shape: Sizes = (ends[-1], *pieces[0].shape[1:])

    def arranged(self, on_disk: Tensor) -> Tensor:
        result = on_disk.new_empty(self._inner.shape)
        for piece, rows in zip(self._pieces, self._rows, strict=True):
            arranged = piece.arranged(on_disk[rows])
            for block in piece.blocks():
                block.whole.within(self._inner).of(result).copy_(block.part.of(arranged))
        return result.view(self._region.arranged_shape)

    def on_disk(self, arranged: Tensor) -> Tensor:
        result, inner = arranged.new_empty(self.shape), arranged.reshape(self._inner.shape)
        for piece, rows in zip(self._pieces, self._rows, strict=True):
            part = arranged.new_empty(piece.arranged_shape)
            for block in piece.blocks():
                block.part.of(part).copy_(block.whole.within(self._inner).of(inner))
            result[rows] = piece.on_disk(part)
        return result

    def blocks(self) -> Iterator[Block]:
        return self._region.blocks()


def _extent(where: int | slice, size: int) -> range:
    found = range(size)[where]
    return range(found, found + 1) if isinstance(found, int) else found


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
    elements = math.prod(size for _, size in axes[inner + 1 :])
    period = math.prod(size for _, size in axes[first:])
    start = sum(
        axes[place][0].start * math.prod(size for _, size in axes[place + 1 :]) for place in range(first, inner + 1)
    )
    # whole axes before the first cut: the stretch comes once for each index of them
    repeat = math.prod(size for _, size in axes[:first])
    return _Run(start, len(axes[inner][0]) * elements, period, repeat)


Condition: TypeAlias = Callable[[ModelSection, int], bool]
"""Says whether a tensor exists, by model and layer (-1 outside layers)."""


def always(model: ModelSection, layer: int) -> bool:
    return True


@dataclass(frozen=True)
class TensorPattern:
    """A tensor of Hugging Face; placeholders in its name stand for layer and expert."""

    name: str
    axes: str
    at: Places = field(default_factory=dict)
    """Position of the tensor in the fused tensor."""
    region: str = ""
    """Axes of that position if the tensor fills it in another order; `axes` and `pieces` then refer to these, else to
    the fused tensor."""
    pieces: tuple[TensorPattern, ...] = ()
    """Tensors whose rows it joins, if several; only their axes and positions count."""


@dataclass(frozen=True)
class Rule:
    """A tensor of a checkpoint and its parts on disk."""

    key: str
    """Key of the tensor, with `.*.` for a layer's number."""
    axes: str
    """Axes of the tensor, without the axis of layers."""
    parts: tuple[TensorPattern, ...]
    when: Condition = always
    keeps_dtype: bool = False
    """Whether the tensor keeps its dtype when weights are cast."""
    others: tuple[tuple[TensorPattern, ...], ...] = ()
    """Equivalent parts under other names in files of the family; `Family.as_stored` chooses."""

    def only(self, condition: Condition) -> Rule:
        """Returns the same rule with an additional condition."""
        own = self.when
        return replace(self, when=lambda model, layer: own(model, layer) and condition(model, layer))


@dataclass(frozen=True)
class HfTensor:
    """A tensor on disk and its position in a global tensor."""

    name: str
    arrangement: Arrangement | JoinedArrangement

    @property
    def shape(self) -> Sizes:
        return self.arrangement.shape


@dataclass(frozen=True)
class FilledSlice:
    """A slice of a global tensor and the tensors that fill it, none inside another."""

    key: str
    at: TensorSlice
    tensors: tuple[HfTensor, ...]
    keeps_dtype: bool


@dataclass(frozen=True)
class Table:
    shapes: dict[str, Sizes]
    """Checkpoint key -> shape of the global tensor, without vocabulary padding."""
    slices: tuple[FilledSlice, ...]
    copies: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor that some folders hold twice -> name of the tensor that it must equal."""

    def without(self, key: str) -> Table:
        """Returns the table without one tensor of a checkpoint."""
        shapes = {name: shape for name, shape in self.shapes.items() if name != key}
        return replace(self, shapes=shapes, slices=tuple(filled for filled in self.slices if filled.key != key))

    def tensors(self) -> Iterator[tuple[HfTensor, FilledSlice]]:
        """Yields every tensor of Hugging Face with the slice that it fills."""
        for filled in self.slices:
            for tensor in filled.tensors:
                yield tensor, filled


_STREAMED_ELEMENTS = 1 << 23
_LAYERS, _DEPTHS = "decoder.layers.", "mtp.layers."


def build_table(rules: tuple[Rule, ...], model: ModelSection, sizes: Mapping[str, int], stacked: bool) -> Table:
    """Applies the rules to a model; L of the sizes is the number of layers, which a checkpoint may stack."""
    shapes: dict[str, Sizes] = {}
    slices: list[FilledSlice] = []
    # layers outside, rules inside: slices come in the order of the model
    for scope in _scopes(model, stacked):
        for rule in rules:
            # `like`, not `number`: a depth is built like the last layer, and has no place among the layers of the
            # section
            if _prefix(rule.key) == scope.prefix and rule.when(model, scope.like):
                key, axes = rule.key.replace(".*.", scope.infix), f"L {rule.axes}" if "L" in scope.fixed else rule.axes
                shapes[key] = shape(axes, sizes)
                slices += _slices(rule, key, axes, scope, sizes)
    return Table(shapes, tuple(slices))


@dataclass(frozen=True)
class _Scope:
    """One layer, or the model outside layers."""

    prefix: str
    infix: str
    number: int
    like: int
    """Layer whose kind it has."""
    fixed: Fixed


def _scopes(model: ModelSection, stacked: bool) -> Iterator[_Scope]:
    """Yields all scopes; MTP depths follow the layers in Hugging Face's numbers and are like the last one."""
    yield _Scope("", "", -1, -1, {})
    for layer in range(model.num_layers):
        yield _Scope(_LAYERS, "." if stacked else f".{layer}.", layer, layer, {"L": layer} if stacked else {})
    for depth, like in enumerate(model.layers_ahead):
        yield _Scope(_DEPTHS, f".{depth}.", model.num_layers + depth, like, {})


def _prefix(key: str) -> str:
    return next((prefix for prefix in (_LAYERS, _DEPTHS) if key.startswith(f"{prefix}*.")), "")


def _slices(rule: Rule, key: str, axes: str, scope: _Scope, sizes: Mapping[str, int]) -> Iterator[FilledSlice]:
    # GPT-OSS has all experts of a layer in one tensor: then the axis of experts is like any other
    by_expert = all("{E}" in part.name for part in rule.parts)
    of_experts: list[dict[str, int]] = [{"E": number} for number in range(sizes["E"])] if by_expert else [{}]
    for expert in of_experts:
        place = {**scope.fixed, **expert}
        free = [name for group in groups(axes) for name in group if name not in place]
        hull = Arrangement(axes, " ".join(free), place, sizes)
        # each fixed axis (layer, expert) is a separate dimension, so the rest is one slice
        (block,) = hull.blocks()
        tensors = tuple(
            HfTensor(
                part.name.format(L=scope.number, **expert),
                _arrangement(part, hull, axes, place, sizes),
            )
            for part in rule.parts
        )
        yield FilledSlice(key, block.whole, tensors, rule.keeps_dtype)


def _arrangement(
    part: TensorPattern, hull: Arrangement, axes: str, place: Fixed, sizes: Mapping[str, int]
) -> Arrangement | JoinedArrangement:
    here = {**place, **_places(part, sizes)}
    if part.region:
        # the place on an axis of layers is one index, so the region lacks that axis
        in_order = " ".join(f"({' '.join(names)})" for names in groups(axes) if not place.keys() >= {*names})
        return _in_region(part, Arrangement(axes, in_order, here, sizes), sizes)
    if part.pieces:
        (block,) = hull.blocks()
        return JoinedArrangement(hull, block.whole, _pieces(part, axes, here, sizes))
    return Arrangement(axes, part.axes, here, sizes)


def order_in_region(part: TensorPattern, sizes: Mapping[str, int]) -> JoinedArrangement | None:
    """Returns the layout of a part in its region; None if its order is that of the fused tensor."""
    return _in_region(part, Arrangement(part.region, part.region, {}, sizes), sizes) if part.region else None


def _in_region(part: TensorPattern, region: Arrangement, sizes: Mapping[str, int]) -> JoinedArrangement:
    inner = TensorSlice.whole(shape(part.region, sizes))
    return JoinedArrangement(region, inner, _pieces(part, part.region, {}, sizes))


def _pieces(part: TensorPattern, axes: str, place: Fixed, sizes: Mapping[str, int]) -> list[Arrangement]:
    pieces = part.pieces or (replace(part, at={}),)
    return [Arrangement(axes, piece.axes, {**place, **_places(piece, sizes)}, sizes) for piece in pieces]


def _places(part: TensorPattern, sizes: Mapping[str, int]) -> Fixed:
    return part.at(sizes) if callable(part.at) else part.at


Read: TypeAlias = "Callable[[str], Tensor]"
"""Returns a tensor of Hugging Face by name, as a view if possible."""


def read_slice(filled: FilledSlice, wanted: TensorSlice, read: Read) -> Tensor:
    """Reads a slice of a global tensor from tensors on disk; copies only numbers inside the slice.

    Args:
        filled: A part of the global tensor.
        wanted: Slice of the global tensor, inside `filled`.

    Returns:
        Contiguous tensor of the wanted shape; if it is a whole tensor on disk, that tensor itself.
    """
    result: Tensor | None = None
    for tensor in filled.tensors:
        arranged: Tensor | None = None  # one that is reordered is reordered once for all its slices
        for block in tensor.arrangement.blocks():
            shared = wanted.intersect(block.whole)
            if shared is None:
                continue
            arranged = tensor.arrangement.arranged(read(tensor.name)) if arranged is None else arranged
            source = block.part.of(arranged)
            found = shared.within(block.whole).of(source)
            # a view of the mapped file: no copy
            if shared == wanted and found.is_contiguous():
                return found
            if result is None:
                result = found.new_empty(wanted.shape)
            shared.within(wanted).of(result).copy_(found)
    assert result is not None, filled.key
    return result


def slices_to_write(filled: FilledSlice) -> list[TensorSlice]:
    """Returns the best slices for writing a part: single tensors on disk if each is a slice, else the whole part."""
    blocks = [block for tensor in filled.tensors for block in tensor.arrangement.blocks()]
    # gate and up each as one slice: written from the page cache without being joined first
    return [block.whole for block in blocks] if len(blocks) == len(filled.tensors) else [filled.at]


def _joined(blocks: Sequence[Block], found: Sequence[Tensor]) -> Tensor:
    if len(blocks) == 1:
        return found[0]
    ends = [tuple(map(sum, zip(*block.part, strict=True))) for block in blocks]
    result = found[0].new_empty(tuple(map(max, zip(*ends, strict=True))))
    for block, values in zip(blocks, found, strict=True):
        block.part.of(result).copy_(values)
    return result


ReadGlobal: TypeAlias = "Callable[[str, TensorSlice], Tensor]"
"""Returns a slice of a global tensor by key, as a view if possible."""


def stream_tensor(tensor: HfTensor, key: str, read: ReadGlobal) -> Iterator[Tensor]:
    """Yields the numbers of a tensor in the order of the disk, a part at a time, from the global tensor.

    Yields:
        Parts of [elements] each; views if `read` gives views. A reordered tensor comes as a whole.
    """
    arrangement = tensor.arrangement
    blocks = list(arrangement.blocks())
    if arrangement.is_reordered:
        # the numbers of a reordered tensor are scattered over the whole, so no part of it can be streamed
        yield arrangement.on_disk(_joined(blocks, [read(key, block.whole) for block in blocks])).contiguous().view(-1)
        return
    for block in blocks:  # each is contiguous on disk: only layers and experts precede the repeated axes
        for part in block.whole.cut(_STREAMED_ELEMENTS):
            yield read(key, part).contiguous().view(-1)
