"""Proves a conversion: rebuilds each Hugging Face tensor from the checkpoint, and compares it bit for bit."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch

from mtrain.base.background import mapped
from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.base.tensor_slice import TensorSlice
from mtrain.convert.carried import Carried
from mtrain.convert.work import Meter
from mtrain.hf.io.block_scaled import Weights
from mtrain.hf.io.mxfp4 import SCALES_SUFFIX, packed, rounding_error, unpacked
from mtrain.hf.io.safetensors import SafetensorsFile, same_bits, shown_names
from mtrain.hf.schema.table import FilledSlice, HfTensor, Table, stream_tensor


class Readable(Protocol):
    """Global tensors of a checkpoint, as saved or merged with adapters."""

    @property
    def folder(self) -> Path: ...

    def read(self, key: str, region: TensorSlice) -> torch.Tensor:
        """Reads a region of a tensor; do not write to the result."""
        ...


class Proof(NamedTuple):
    """Result of a successful comparison."""

    num_tensors: int
    size_bytes: int
    """Size of the Hugging Face tensors."""
    num_in_mxfp4: int = 0
    """Tensors that were written in MXFP4."""
    rounding: Mapping[str, float] = {}
    """Name -> largest error of each tensor that MXFP4 rounds, relative to its block's largest number."""


@dataclass(frozen=True)
class Sides:
    """A checkpoint and a Hugging Face folder, one of which was converted into the other."""

    table: Table
    checkpoint: Readable
    weights: Weights
    into: Literal["checkpoint", "folder"]
    """Side that was written, in whose dtype both are compared."""
    key_of: Callable[[str], str] = str
    """Converts a key in the table to a key in the checkpoint."""
    carried: Carried | None = None
    scales: Carried | None = None
    """Original scales of weights in MXFP4, which may differ only by rounding."""


def prove(sides: Sides, num_workers: int, check: Callable[[], None] = lambda: None) -> Proof:
    """Compares every Hugging Face tensor with the one that the checkpoint gives.

    `check` is called between two pieces of work, in any thread; an error that it raises ends the proof.
    """
    checkpoint, weights, scales = sides.checkpoint, sides.weights, sides.scales or {}
    tensors = list(sides.table.tensors())
    facts = {tensor.name: weights.facts(tensor.name) for tensor, _ in tensors}
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in facts.items()}
    stored = sides.carried or {}
    sizes |= {name: file.entries[name].stop - file.entries[name].start for name, file in stored.items()}
    rounding: dict[str, float] = {}

    def differs(item: tuple[HfTensor, FilledSlice]) -> bool:
        tensor, filled = item
        parts = stream_tensor(tensor, sides.key_of(filled.key), checkpoint.read)
        theirs, had = weights.tensor(tensor.name), scales.get(tensor.name + SCALES_SUFFIX)
        check()
        meter.add(sizes[tensor.name])
        if had is None:
            return _is_other(parts, theirs, sides.into, check)
        return _is_rounded_otherwise(tensor.name, whole(tensor, parts), had, theirs, rounding)

    def is_changed(name: str) -> bool:
        check()
        meter.add(sizes[name])
        return name not in weights.names() or not same_bits(stored[name].tensor(name), weights.tensor(name))

    with Meter("proving", sum(sizes.values())) as meter:
        results = mapped(differs, tensors, num_workers)
        differing = [tensor.name for (tensor, _), differ in zip(tensors, results, strict=True) if differ]
        differing += [name for name in stored if is_changed(name)]
    if differing:
        raise DataError(
            f"{len(differing)} of {counted(len(sizes), 'tensor')} {'differs' if len(differing) == 1 else 'differ'} "
            f"between {checkpoint.folder} and the Hugging Face folder: {shown_names(differing)}"
        )
    return Proof(len(sizes), sum(sizes.values()), len(scales), rounding)


def whole(tensor: HfTensor, parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Joins the parts of a tensor; does not copy a single part."""
    pieces = list(parts)
    return (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).view(tensor.shape)


def _is_other(
    parts: Iterable[torch.Tensor],
    written: torch.Tensor,
    into: Literal["checkpoint", "folder"],
    check: Callable[[], None],
) -> bool:
    """Returns whether a tensor differs from the checkpoint's numbers, which come in disk order."""
    theirs, start = written.contiguous().view(-1), 0
    for ours in parts:
        check()
        part = theirs[start : start + ours.numel()]
        dtype = ours.dtype if into == "checkpoint" else part.dtype
        if not same_bits(ours.to(dtype), part.to(dtype)):
            return True
        start += ours.numel()
    return start != theirs.numel()


def _is_rounded_otherwise(
    name: str, exact: torch.Tensor, scales: SafetensorsFile, written: torch.Tensor, rounding: dict[str, float]
) -> bool:
    """Returns whether numbers in MXFP4 differ from the rounded ones; records their largest error."""
    if exact.dtype == written.dtype and same_bits(exact, written):
        return False  # nothing was rounded
    if error := rounding_error(exact, written):
        rounding[name] = error
    return not same_bits(unpacked(*packed(name, exact, scales.tensor(name + SCALES_SUFFIX))), written)
