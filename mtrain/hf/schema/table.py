"""Tables of the Hugging Face tensors that make up each tensor of a checkpoint.

A family is a tuple of rules. A rule names a tensor of a checkpoint, its axes, and its tensors on disk. `{L}` and `{E}`
in a name stand for the numbers of layers and experts, which are axes like any other: a checkpoint stacks identical
layers into one tensor, whose first axis is L.

Words describe shapes: "(G s d) h" is a matrix whose rows run over groups, slots of a group and dimensions of a head. A
tensor with the same numbers in another order has the same words in another order, and a part of a fused tensor fixes
one of the axes: the key of each group is slot -2. The two descriptions determine a conversion in both directions, so
that it cannot confuse axes of equal size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import Sizes, TensorSlice
from mtrain.config.schema.model import ModelSection

if TYPE_CHECKING:
    from torch import Tensor

Fixed: TypeAlias = Mapping[str, int | slice]
"""Axis -> position of a part on it."""
Position: TypeAlias = "Fixed | Callable[[Mapping[str, int]], Fixed]"
"""Position of a part, or a function of the sizes of the axes that returns it."""
_GROUP = re.compile(r"\(([^)]*)\)|(\S+)")


def groups(axes: str) -> list[list[str]]:
    """Splits a description into the axes of each dimension: "(G s d) h" -> [[G, s, d], [h]]."""
    return [(inner or single).split() for inner, single in _GROUP.findall(axes)]


def shape(axes: str, sizes: Mapping[str, int]) -> Sizes:
    """Returns the shape of a tensor with this description."""
    return tuple(math.prod(sizes[name] for name in group) for group in groups(axes))


def stretch(axis: str, rows: Mapping[str, str], first: str, last: str = "") -> Callable[[Mapping[str, int]], Fixed]:
    """Builds the position of the rows from the kind `first` to the kind `last`, by default the same.

    Args:
        axis: Axis of the rows.
        rows: Kind of rows, in the order of the axis -> axes, as words, whose product is their number.
    """
    kinds = list(rows)

    def position(sizes: Mapping[str, int]) -> Fixed:
        ends = [0, *accumulate(math.prod(sizes[name] for name in words.split()) for words in rows.values())]
        return {axis: slice(ends[kinds.index(first)], ends[kinds.index(last or first) + 1])}

    return position


class Block(NamedTuple):
    """Slices of a global tensor and of a part of it, with the same numbers in the same order."""

    whole: TensorSlice
    part: TensorSlice


@dataclass(frozen=True)
class _Run:
    """Position of a part along one dimension of the whole: `repeat` runs of `count` elements, `step` apart."""

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
            part: Axes of the part on disk, in any order, without axes on which the part has one fixed position.
            fixed: Position of the part on some axes; it covers the others completely.
            sizes: Size of each axis of the whole.
        """
        extents = {
            name: _extent(fixed.get(name, slice(None)), sizes[name]) for group in groups(whole) for name in group
        }
        on_disk = [name for group in groups(part) for name in group]
        in_order = [name for group in groups(whole) for name in group if name in on_disk]
        # the part has only axes of the whole, each once
        assert sorted(on_disk) == sorted(set(in_order)), f"{part} of {whole}"
        # an axis that the part lacks must be fixed at one position
        assert all(len(extents[name]) == 1 for name in extents if name not in on_disk), f"{part} of {whole}"
        self.shape: Sizes = tuple(math.prod(len(extents[name]) for name in group) for group in groups(part))
        """Shape on disk."""
        # one dimension per axis, so that axes of equal size can be permuted by name
        self._unfolded = [len(extents[name]) for name in on_disk]
        self._order = [on_disk.index(name) for name in in_order]
        # without a tensor, so that a rank finds its slices without reading a byte
        self._runs = [_run([(extents[name], sizes[name]) for name in group]) for group in groups(whole)]

    @property
    def is_reordered(self) -> bool:
        """Whether the numbers have another order on disk."""
        return self._order != sorted(self._order)

    @property
    def arranged_shape(self) -> Sizes:
        """Shape of the part in the dimensions of the whole."""
        return tuple(run.repeat * run.count for run in self._runs)

    def arranged(self, on_disk: Tensor) -> Tensor:
        """Converts a tensor on disk to the dimensions and order of the whole; a view, unless reordered."""
        return on_disk.view(self._unfolded).permute(self._order).reshape(self.arranged_shape)

    def on_disk(self, arranged: Tensor) -> Tensor:
        """Inverts `arranged`."""
        in_order = arranged.reshape([self._unfolded[axis] for axis in self._order])
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
    """Layout of a tensor on disk that joins the rows of several parts; has the interface of `Arrangement`."""

    is_reordered = True

    def __init__(self, region: Arrangement, inner: TensorSlice, pieces: Sequence[Arrangement]) -> None:
        """
        Args:
            region: Position of the tensor, in the order of the whole.
            inner: Slice that the pieces fill together, in their coordinates.
            pieces: Parts, in their order on disk.
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


def _extent(position: int | slice, size: int) -> range:
    selected = range(size)[position]
    return range(selected, selected + 1) if isinstance(selected, int) else selected


def _run(axes: list[tuple[range, int]]) -> _Run:
    """Describes one dimension; at most one contiguous group of its axes may be restricted."""
    whole = [len(extent) == size for extent, size in axes]
    first = whole.index(False) if False in whole else 0
    # a fixed axis before a restricted one belongs to the same run, because it only moves the start
    inner = first
    while inner < len(axes) and len(axes[inner][0]) == 1 and inner + 1 < len(axes) and not whole[inner + 1]:
        inner += 1
    # after a second restriction, runs would not be equally spaced, which `_Run` cannot express
    assert all(whole[inner + 1 :]), "a dimension is restricted in two places"
    elements = math.prod(size for _, size in axes[inner + 1 :])
    period = math.prod(size for _, size in axes[first:])
    start = sum(
        axes[index][0].start * math.prod(size for _, size in axes[index + 1 :]) for index in range(first, inner + 1)
    )
    # the run repeats for each index of the whole axes before it
    repeat = math.prod(size for _, size in axes[:first])
    return _Run(start, len(axes[inner][0]) * elements, period, repeat)


Condition: TypeAlias = Callable[[ModelSection, int], bool]
"""Returns whether a tensor exists in a model and a layer (-1 outside layers)."""


def always(model: ModelSection, layer: int) -> bool:
    return True


@dataclass(frozen=True)
class TensorPattern:
    """A Hugging Face tensor; `{L}` and `{E}` in its name stand for layer and expert."""

    name: str
    axes: str
    at: Position = field(default_factory=dict)
    """Position of the tensor in the fused tensor."""
    region: str = ""
    """Axes of that position if the tensor fills it in another order; `axes` and `pieces` then refer to the region
    instead of the fused tensor."""
    pieces: tuple[TensorPattern, ...] = ()
    """Patterns whose rows the tensor joins; only their axes and positions matter."""
    transposed: str = ""
    """Axes of the tensor in files of programs that transpose it; its stored shape tells. Empty: always `axes`."""


@dataclass(frozen=True)
class Rule:
    """A tensor of a checkpoint, and its parts on disk."""

    key: str
    """Key of the tensor, with `.*.` for a layer's number."""
    axes: str
    """Axes of the tensor, without the axis of layers."""
    parts: tuple[TensorPattern, ...]
    when: Condition = always
    keeps_dtype: bool = False
    """Whether the tensor keeps its dtype when a conversion casts weights."""
    alternatives: tuple[tuple[TensorPattern, ...], ...] = ()
    """Equivalent parts under other names, among which `Family.as_stored` chooses."""

    def only(self, condition: Condition) -> Rule:
        """Returns the same rule with an additional condition."""
        when = self.when
        return replace(self, when=lambda model, layer: when(model, layer) and condition(model, layer))


@dataclass(frozen=True)
class HfTensor:
    """A tensor on disk, and its position in a global tensor."""

    name: str
    arrangement: Arrangement | JoinedArrangement

    @property
    def shape(self) -> Sizes:
        return self.arrangement.shape


@dataclass(frozen=True)
class FilledSlice:
    """A slice of a global tensor, and the tensors on disk that fill it; table slices do not overlap."""

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
    """Copy -> original of tensors that some folders have twice."""

    def without(self, key: str) -> Table:
        """Returns the table without one of the checkpoint's tensors."""
        shapes = {name: shape for name, shape in self.shapes.items() if name != key}
        return replace(self, shapes=shapes, slices=tuple(filled for filled in self.slices if filled.key != key))

    def tensors(self) -> Iterator[tuple[HfTensor, FilledSlice]]:
        """Yields every tensor on disk with the slice that it fills."""
        for filled in self.slices:
            for tensor in filled.tensors:
                yield tensor, filled


_STREAMED_ELEMENTS = 1 << 23
_LAYERS, _DEPTHS = "decoder.layers.", "mtp.layers."


def build_table(
    rules: tuple[Rule, ...],
    model: ModelSection,
    sizes: Mapping[str, int],
    stacked: bool,
    stored: Mapping[str, Sizes] = MappingProxyType({}),
) -> Table:
    """Applies a family's rules to a model; a checkpoint may stack layers, whose number is L in `sizes`.

    Args:
        stored: Shapes of a folder's tensors, by name, if one is read or written again.

    Raises:
        DataError: The shape of a stored tensor does not tell whether it is transposed.
    """
    shapes: dict[str, Sizes] = {}
    slices: list[FilledSlice] = []
    # layer by layer, so that slices are in the order of the model
    for scope in _scopes(model, stacked):
        for rule in rules:
            # `like`, because an MTP depth is like a layer, but has no number among the model's layers
            if _prefix(rule.key) == scope.prefix and rule.when(model, scope.like):
                key, axes = rule.key.replace(".*.", scope.infix), f"L {rule.axes}" if "L" in scope.fixed else rule.axes
                shapes[key] = shape(axes, sizes)
                slices += _slices(rule, key, axes, scope, sizes, stored)
    return Table(shapes, tuple(slices))


@dataclass(frozen=True)
class _Scope:
    """One layer, one MTP depth, or the model outside layers."""

    prefix: str
    infix: str
    number: int
    like: int
    """Layer of the same kind."""
    fixed: Fixed


def _scopes(model: ModelSection, stacked: bool) -> Iterator[_Scope]:
    """Yields all scopes; in Hugging Face's numbering, MTP depths follow the layers."""
    yield _Scope("", "", -1, -1, {})
    for layer in range(model.num_layers):
        yield _Scope(_LAYERS, "." if stacked else f".{layer}.", layer, layer, {"L": layer} if stacked else {})
    for depth, like in enumerate(model.layers_ahead):
        yield _Scope(_DEPTHS, f".{depth}.", model.num_layers + depth, like, {})


def _prefix(key: str) -> str:
    return next((prefix for prefix in (_LAYERS, _DEPTHS) if key.startswith(f"{prefix}*.")), "")


def _slices(
    rule: Rule, key: str, axes: str, scope: _Scope, sizes: Mapping[str, int], stored: Mapping[str, Sizes]
) -> Iterator[FilledSlice]:
    # without {E}, as in GPT-OSS, a tensor has all experts of a layer, along an axis like any other
    by_expert = all("{E}" in part.name for part in rule.parts)
    of_experts: list[dict[str, int]] = [{"E": number} for number in range(sizes["E"])] if by_expert else [{}]
    for expert in of_experts:
        fixed = {**scope.fixed, **expert}
        free = [name for group in groups(axes) for name in group if name not in fixed]
        hull = Arrangement(axes, " ".join(free), fixed, sizes)
        # each fixed axis (layer, expert) is a separate dimension, so the others form one slice
        (block,) = hull.blocks()
        named = [(part, part.name.format(L=scope.number, **expert)) for part in rule.parts]
        tensors = tuple(
            HfTensor(name, _arrangement(_as_stored(part, name, sizes, stored), hull, axes, fixed, sizes))
            for part, name in named
        )
        yield FilledSlice(key, block.whole, tensors, rule.keeps_dtype)


def _as_stored(part: TensorPattern, name: str, sizes: Mapping[str, int], stored: Mapping[str, Sizes]) -> TensorPattern:
    if not part.transposed or name not in stored:
        return part
    usual, transposed = shape(part.axes, sizes), shape(part.transposed, sizes)
    if usual == transposed:
        raise DataError(
            f"{name} has shape {list(usual)}, which does not tell whether its matrices are transposed (transformers 4 "
            "transposes them, 5 does not); only matrices that are not square can be read"
        )
    return replace(part, axes=part.transposed) if stored[name] == transposed else part


def _arrangement(
    part: TensorPattern, hull: Arrangement, axes: str, fixed: Fixed, sizes: Mapping[str, int]
) -> Arrangement | JoinedArrangement:
    position = {**fixed, **_position(part, sizes)}
    if part.region:
        # without fixed axes, such as that of layers
        in_order = " ".join(f"({' '.join(names)})" for names in groups(axes) if not fixed.keys() >= {*names})
        return _in_region(part, Arrangement(axes, in_order, position, sizes), sizes)
    if part.pieces:
        (block,) = hull.blocks()
        return JoinedArrangement(hull, block.whole, _pieces(part, axes, position, sizes))
    return Arrangement(axes, part.axes, position, sizes)


def order_in_region(part: TensorPattern, sizes: Mapping[str, int]) -> JoinedArrangement | None:
    """Returns the layout of a part in its region; None if it has the order of the fused tensor."""
    return _in_region(part, Arrangement(part.region, part.region, {}, sizes), sizes) if part.region else None


def _in_region(part: TensorPattern, region: Arrangement, sizes: Mapping[str, int]) -> JoinedArrangement:
    inner = TensorSlice.whole(shape(part.region, sizes))
    return JoinedArrangement(region, inner, _pieces(part, part.region, {}, sizes))


def _pieces(part: TensorPattern, axes: str, fixed: Fixed, sizes: Mapping[str, int]) -> list[Arrangement]:
    pieces = part.pieces or (replace(part, at={}),)
    return [Arrangement(axes, piece.axes, {**fixed, **_position(piece, sizes)}, sizes) for piece in pieces]


def _position(part: TensorPattern, sizes: Mapping[str, int]) -> Fixed:
    return part.at(sizes) if callable(part.at) else part.at


Read: TypeAlias = "Callable[[str], Tensor]"
"""Returns a tensor on disk by name, as a view if possible."""


def read_slice(filled: FilledSlice, region: TensorSlice, read: Read) -> Tensor:
    """Reads a region of a global tensor from tensors on disk; copies only numbers inside the region.

    Args:
        filled: A part of the global tensor.
        region: Slice of the global tensor, inside `filled`.

    Returns:
        Contiguous tensor of the region's shape; a view if the region is contiguous on disk.
    """
    result: Tensor | None = None
    for tensor in filled.tensors:
        arranged: Tensor | None = None  # a tensor is reordered at most once
        for block in tensor.arrangement.blocks():
            shared = region.intersect(block.whole)
            if shared is None:
                continue
            arranged = tensor.arrangement.arranged(read(tensor.name)) if arranged is None else arranged
            source = block.part.of(arranged)
            values = shared.within(block.whole).of(source)
            # a view of the mapped file
            if shared == region and values.is_contiguous():
                return values
            if result is None:
                result = values.new_empty(region.shape)
            shared.within(region).of(result).copy_(values)
    assert result is not None, filled.key
    return result


def slices_to_write(filled: FilledSlice) -> list[TensorSlice]:
    """Returns the best slices to write: one per tensor on disk if each of them is a slice, else the whole part."""
    blocks = [block for tensor in filled.tensors for block in tensor.arrangement.blocks()]
    # gate and up, for example, are two slices, which are written from the page cache without joining them
    return [block.whole for block in blocks] if len(blocks) == len(filled.tensors) else [filled.at]


def _joined(blocks: Sequence[Block], tensors: Sequence[Tensor]) -> Tensor:
    if len(blocks) == 1:
        return tensors[0]
    ends = [tuple(map(sum, zip(*block.part, strict=True))) for block in blocks]
    result = tensors[0].new_empty(tuple(map(max, zip(*ends, strict=True))))
    for block, values in zip(blocks, tensors, strict=True):
        block.part.of(result).copy_(values)
    return result


ReadGlobal: TypeAlias = "Callable[[str, TensorSlice], Tensor]"
"""Returns a slice of a global tensor, given its key, as a view if possible."""


def stream_tensor(tensor: HfTensor, key: str, read: ReadGlobal) -> Iterator[Tensor]:
    """Yields the numbers of a tensor on disk, in disk order, part by part, from the global tensor.

    Yields:
        Parts [elements], views if `read` returns views; a reordered tensor is one part.
    """
    arrangement = tensor.arrangement
    blocks = list(arrangement.blocks())
    if arrangement.is_reordered:
        # the numbers of a reordered tensor are scattered over the whole, so it cannot be streamed
        yield arrangement.on_disk(_joined(blocks, [read(key, block.whole) for block in blocks])).contiguous().view(-1)
        return
    for block in blocks:  # contiguous on disk, because only layers and experts precede the repeated axes
        for part in block.whole.cut(_STREAMED_ELEMENTS):
            yield read(key, part).contiguous().view(-1)
