"""Tables: which tensors of Hugging Face make up which tensor of a checkpoint.

A family is a tuple of rules. A rule names one tensor of a checkpoint, its axes, and the tensors on disk that it
consists of. `{L}` and `{E}` in a name run over layers and experts, which are axes like any other: where all layers are
alike, a checkpoint keeps them in one tensor whose first axis is L.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.axes import Arrangement, Block, Fixed, Sizes, shape

if TYPE_CHECKING:
    from torch import Tensor

Condition: TypeAlias = Callable[[ModelSection, int], bool]
"""Model and layer (-1 outside of layers) -> whether the tensor is there."""


def always(model: ModelSection, layer: int) -> bool:
    """Of every model."""
    return True


@dataclass(frozen=True)
class Part:
    """A tensor of Hugging Face."""

    name: str
    axes: str
    """As it lies on disk."""
    at: Fixed = field(default_factory=dict)
    """Where it lies in the fused tensor."""


@dataclass(frozen=True)
class Rule:
    """A tensor of a checkpoint and what it consists of."""

    key: str
    """In layers with `.*.` for the layer's number."""
    axes: str
    """Without the axis of layers."""
    parts: tuple[Part, ...]
    when: Condition = always
    keeps_dtype: bool = False
    """Whether a cast of the weights leaves it alone."""

    def only(self, condition: Condition) -> Rule:
        """The same rule where the condition holds as well."""
        own = self.when
        return replace(self, when=lambda model, layer: own(model, layer) and condition(model, layer))


@dataclass(frozen=True)
class HfTensor:
    """One tensor on disk and its place in a global tensor."""

    name: str
    arrangement: Arrangement

    @property
    def shape(self) -> Sizes:
        """On disk."""
        return self.arrangement.shape


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor and the tensors that fill it; none of them lies in another piece."""

    key: str
    offsets: Sizes
    sizes: Sizes
    tensors: tuple[HfTensor, ...]
    keeps_dtype: bool


@dataclass(frozen=True)
class Table:
    """All tensors of one model."""

    shapes: dict[str, Sizes]
    """Checkpoint key -> shape of the global tensor, vocabulary without padding."""
    pieces: tuple[Piece, ...]
    """In the order of the model."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensor that some folders hold a second time -> the one that it must equal."""

    def tensors(self) -> Iterator[tuple[HfTensor, Piece]]:
        """Every tensor of Hugging Face and the piece it belongs to."""
        for piece in self.pieces:
            for tensor in piece.tensors:
                yield tensor, piece


_STREAMED_ELEMENTS = 1 << 23
_LAYERS, _DEPTHS = "decoder.layers.", "mtp.layers."


def build_table(rules: tuple[Rule, ...], model: ModelSection, sizes: Mapping[str, int], stacked: bool) -> Table:
    """The rules applied to a model.

    Args:
        rules: Of its family.
        model: The architecture.
        sizes: Axis -> size; L is the number of layers.
        stacked: Whether the checkpoint keeps all layers in one tensor.
    """
    shapes: dict[str, Sizes] = {}
    pieces: list[Piece] = []
    for scope in _scopes(model, stacked):
        for rule in rules:
            if _prefix(rule.key) == scope.prefix and rule.when(model, scope.like):
                key, axes = rule.key.replace(".*.", scope.infix), f"L {rule.axes}" if "L" in scope.fixed else rule.axes
                shapes[key] = shape(axes, sizes)
                pieces += _pieces(rule, key, axes, scope, sizes)
    return Table(shapes, tuple(pieces))


@dataclass(frozen=True)
class _Scope:
    """One layer, or what lies outside of layers."""

    prefix: str
    infix: str
    number: int
    """Of the layer in Hugging Face's names."""
    like: int
    """The layer whose kind it has."""
    fixed: Fixed


def _scopes(model: ModelSection, stacked: bool) -> Iterator[_Scope]:
    """Depths of multi-token prediction follow the layers in Hugging Face's numbers, and are of the last one's kind."""
    yield _Scope("", "", -1, -1, {})
    for layer in range(model.num_layers):
        yield _Scope(_LAYERS, "." if stacked else f".{layer}.", layer, layer, {"L": layer} if stacked else {})
    for depth in range(model.mtp_depths):
        yield _Scope(_DEPTHS, f".{depth}.", model.num_layers + depth, model.num_layers - 1, {})


def _prefix(key: str) -> str:
    return next((prefix for prefix in (_LAYERS, _DEPTHS) if key.startswith(f"{prefix}*.")), "")


def _pieces(rule: Rule, key: str, axes: str, scope: _Scope, sizes: Mapping[str, int]) -> Iterator[Piece]:
    """One for each expert where experts lie in tensors of their own, else one."""
    by_expert = all("{E}" in part.name for part in rule.parts)
    for experts in product(*([range(sizes["E"])] if by_expert else [])):
        place = {**scope.fixed, **dict(zip("E", experts))}
        hull = Arrangement(axes, " ".join(name for name in _names(axes) if name not in place), place, sizes)
        (block,) = hull.blocks()
        tensors = tuple(
            HfTensor(
                part.name.format(L=scope.number, **dict(zip("E", experts))),
                Arrangement(axes, part.axes, {**place, **part.at}, sizes),
            )
            for part in rule.parts
        )
        yield Piece(key, block.offsets, block.sizes, tensors, rule.keeps_dtype)


def _names(axes: str) -> list[str]:
    return axes.replace("(", " ").replace(")", " ").split()


Read: TypeAlias = "Callable[[str], Tensor]"
"""Name of a tensor of Hugging Face -> the tensor, as a view where it can be one."""


def read_box(piece: Piece, offsets: Sizes, sizes: Sizes, read: Read) -> Tensor:
    """A part of a global tensor, made from tensors on disk; only what lies in the part is copied.

    Args:
        piece: A piece of the global tensor.
        offsets: Where the part begins in the global tensor; it must lie inside the piece.
        sizes: How large it is.
        read: Gives the tensors on disk.

    Returns:
        Of shape `sizes`, contiguous; where it is a whole tensor on disk, that tensor itself.
    """
    result: Tensor | None = None
    for tensor in piece.tensors:
        for block in tensor.arrangement.blocks():
            begin = [max(a, b) for a, b in zip(offsets, block.offsets)]
            end = [min(a + m, b + n) for a, m, b, n in zip(offsets, sizes, block.offsets, block.sizes)]
            if any(first >= last for first, last in zip(begin, end)):
                continue
            source = tensor.arrangement.arranged(read(tensor.name))
            target_at = [first - offset for first, offset in zip(begin, offsets)]
            source_at = [p + first - o for p, first, o in zip(block.part_offsets, begin, block.offsets)]
            extent = [last - first for first, last in zip(begin, end)]
            found = narrowed(source, source_at, extent)
            if tuple(extent) == sizes and found.is_contiguous():
                return found
            if result is None:
                result = found.new_empty(sizes)
            narrowed(result, target_at, extent).copy_(found)
    assert result is not None, piece.key
    return result


def boxes_to_write(piece: Piece) -> list[Block]:
    """The boxes in which a piece is best written: single tensors on disk where each is a box, else the piece."""
    blocks = [block for tensor in piece.tensors for block in tensor.arrangement.blocks()]
    if len(blocks) == len(piece.tensors):
        return blocks
    return [Block(piece.offsets, (0,) * len(piece.offsets), piece.sizes)]


ReadGlobal: TypeAlias = "Callable[[str, Sizes, Sizes], Tensor]"
"""Key, offsets and sizes -> that box of a global tensor, as a view where it can be one."""


def stream_tensor(tensor: HfTensor, key: str, read: ReadGlobal) -> Iterator[Tensor]:
    """The numbers of a tensor in the order of the disk, made from the global tensor, a part at a time.

    Args:
        tensor: From the table.
        key: Of the global tensor.
        read: Gives boxes of global tensors.

    Returns:
        [elements] each; views where `read` gives views. A reordered tensor comes as a whole.
    """
    arrangement = tensor.arrangement
    blocks = list(arrangement.blocks())
    if arrangement.is_reordered:
        (block,) = blocks
        yield arrangement.on_disk(read(key, block.offsets, block.sizes)).contiguous().view(-1)
        return
    for block in blocks:  # each lies in one stretch on disk, since only layers and experts come before what repeats
        for offsets, sizes in cut(block.offsets, block.sizes, _STREAMED_ELEMENTS):
            yield read(key, offsets, sizes).contiguous().view(-1)


def cut(offsets: Sizes, sizes: Sizes, num_elements: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Cuts a box across its first real dimension into boxes of about so many elements: offsets and sizes of each."""
    total = math.prod(sizes)
    dim = next((number for number, size in enumerate(sizes) if size > 1), 0)
    if total <= num_elements or not sizes:
        yield offsets, sizes
        return
    rows = max(1, num_elements * sizes[dim] // total)
    for start in range(0, sizes[dim], rows):
        count = min(rows, sizes[dim] - start)
        yield (
            (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]),
            (*sizes[:dim], count, *sizes[dim + 1 :]),
        )


def narrowed(tensor: Tensor, offsets: Sizes | list[int], sizes: Sizes | list[int]) -> Tensor:
    """A box of a tensor, as a view."""
    for dim, (start, size) in enumerate(zip(offsets, sizes)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
