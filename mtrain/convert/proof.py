"""The proof behind every conversion: each tensor of Hugging Face, made again from the checkpoint, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.checkpoint.tensors import CheckpointTensors
from mtrain.convert.progress import Meter
from mtrain.errors import DataError
from mtrain.hf.table import HfTensor, Piece, Table, write_tensor

_COMPARED_ELEMENTS = 1 << 24
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Proof(NamedTuple):
    """What was compared."""

    num_tensors: int
    size_bytes: int
    """Of Hugging Face's tensors."""


def prove(
    table: Table,
    checkpoint: CheckpointTensors,
    key_of: Callable[[str], str],
    read: Callable[[str], Tensor],
    num_workers: int,
) -> Proof:
    """Compares every tensor of Hugging Face with what the checkpoint makes of it.

    Where the dtypes differ, because a cast was asked for, both are compared in the one that was written.

    Args:
        table: Of the model.
        checkpoint: One side.
        key_of: Key in the table -> key in the checkpoint.
        read: Gives the other side's tensors.
        num_workers: Threads.

    Raises:
        DataError: Tensors differ; they are named.
    """
    tensors = list(table.tensors())
    sizes = [read(tensor.name).nbytes for tensor, _ in tensors]

    def compare(item: tuple[HfTensor, Piece]) -> str | None:
        tensor, piece = item
        theirs = read(tensor.name)
        ours = write_tensor(tensor, key_of(piece.key), checkpoint.read)
        meter.add(theirs.nbytes)
        return None if same_bits(ours, theirs) else tensor.name

    with Meter("proving", sum(sizes)) as meter, ThreadPoolExecutor(num_workers) as pool:
        differing = [name for name in pool.map(compare, tensors) if name is not None]
    if differing:
        more = f" and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise DataError(
            f"{len(differing)} of {len(tensors)} tensors differ between {checkpoint.folder} and Hugging Face's folder: "
            f"{', '.join(differing[:8])}{more}"
        )
    return Proof(len(tensors), sum(sizes))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and the same bits, after the narrowing cast where dtypes differ."""
    if one.shape != other.shape:
        return False
    for mine, theirs in zip(_slices(one), _slices(other), strict=True):
        if mine.dtype != theirs.dtype:
            narrow = min(mine.dtype, theirs.dtype, key=lambda dtype: (dtype.itemsize, str(dtype)))
            mine, theirs = mine.to(narrow), theirs.to(narrow)
        bits = _BITS[mine.dtype.itemsize]
        if not torch.equal(mine.view(bits), theirs.view(bits)):
            return False
    return True


def _slices(tensor: Tensor) -> Iterator[Tensor]:
    """So that a cast of a large tensor needs little memory."""
    yield from torch.split(tensor.contiguous().view(-1), _COMPARED_ELEMENTS) if tensor.numel() else ()
