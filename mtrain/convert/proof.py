"""The proof behind every conversion: each tensor of Hugging Face, made again from the checkpoint, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mtrain.checkpoint.tensors import CheckpointTensors
from mtrain.convert.progress import Meter
from mtrain.errors import DataError
from mtrain.hf.axes import Sizes
from mtrain.hf.block_scaled import Weights
from mtrain.hf.matching import same_bits, told
from mtrain.hf.table import HfTensor, Piece, Table, write_tensor

_COMPARED_ELEMENTS = 1 << 24


class Proof(NamedTuple):
    """What was compared."""

    num_tensors: int
    size_bytes: int
    """Of Hugging Face's tensors."""


def prove(
    table: Table,
    checkpoint: CheckpointTensors,
    key_of: Callable[[str], str],
    weights: Weights,
    into: Literal["checkpoint", "folder"],
    num_workers: int,
) -> Proof:
    """Compares every tensor of Hugging Face with what the checkpoint makes of it.

    Args:
        table: Of the model.
        checkpoint: One side.
        key_of: Key in the table -> key in the checkpoint.
        weights: The other side.
        into: Which of the two was written: where dtypes differ, because a cast was asked for, its is compared.
        num_workers: Threads.

    Raises:
        DataError: Tensors differ; they are named.
    """
    tensors = list(table.tensors())
    sizes = {tensor.name: _size_bytes(*weights.facts(tensor.name)) for tensor, _ in tensors}

    def compare(item: tuple[HfTensor, Piece]) -> str | None:
        tensor, piece = item
        theirs = weights.tensor(tensor.name)
        ours = write_tensor(tensor, key_of(piece.key), checkpoint.read)
        meter.add(sizes[tensor.name])
        return None if same_numbers(ours, theirs, ours.dtype if into == "checkpoint" else theirs.dtype) else tensor.name

    with Meter("proving", sum(sizes.values())) as meter, ThreadPoolExecutor(num_workers) as pool:
        differing = [name for name in pool.map(compare, tensors) if name is not None]
    if differing:
        raise DataError(
            f"{len(differing)} of {len(tensors)} tensors differ between {checkpoint.folder} and Hugging Face's folder: "
            f"{told(differing)}"
        )
    return Proof(len(tensors), sum(sizes.values()))


def same_numbers(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors have the same shape and, cast to the dtype, the same bits."""
    if one.shape != other.shape:
        return False
    pieces = zip(_slices(one), _slices(other), strict=True)
    return all(same_bits(mine.to(dtype), theirs.to(dtype)) for mine, theirs in pieces)


def _size_bytes(dtype: torch.dtype, shape: Sizes) -> int:
    return math.prod(shape) * dtype.itemsize


def _slices(tensor: Tensor) -> Iterator[Tensor]:
    """So that a cast of a large tensor needs little memory."""
    yield from torch.split(tensor.contiguous().view(-1), _COMPARED_ELEMENTS) if tensor.numel() else ()
