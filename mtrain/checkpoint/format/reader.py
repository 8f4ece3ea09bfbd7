"""Global tensors of a checkpoint without ranks: files are mapped, and what is read is a view of them where it can be.

A global tensor may lie there in any number of boxes. What is read stays in the page cache and is no memory of its own,
unless it has to be put together from several boxes.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.plain_files import open_plain_file
from mtrain.checkpoint.format.safe_metadata import Box, Sizes, read_metadata
from mtrain.checkpoint.format.torch_save_reader import FAULTS, mapped_tensor


class CheckpointTensors:
    """The tensors of a checkpoint, read box by box without copying where that is possible."""

    def __init__(self, folder: Path) -> None:
        """Opens a checkpoint; what is not a tensor (random states of foreign checkpoints) is left out.

        Raises:
            DataError: The list of tensors is missing, damaged, or would run code.
        """
        self.folder = folder
        self._maps: dict[str, mmap.mmap] = {}
        self.tensors, self.others = read_metadata(folder)

    def read(self, key: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        """One box of a global tensor.

        Args:
            key: Name of the tensor.
            offsets: Where the box begins.
            sizes: How large it is.

        Returns:
            Of shape `sizes`: a view of the mapped file where one saved box holds all of it, else a copy. Not to be
            written to.

        Raises:
            DataError: A file is cut or damaged, or the saved boxes do not cover the part that is asked for.
        """
        tensor = self.tensors[key]
        wanted = Box(key, offsets, sizes, "", 0, 0)
        found = [(box, part) for box in tensor.boxes if (part := overlap(box, wanted)) is not None]
        if len(found) == 1 and found[0][1] == sizes:
            return self._inside(found[0][0], offsets, sizes)
        if sum(math.prod(part) for _, part in found) != math.prod(sizes):
            raise DataError(f"{self.folder}: {key} is not whole: parts of {list(tensor.shape)} are missing")
        result = torch.empty(sizes, dtype=tensor.dtype)
        is_filled = torch.zeros(sizes, dtype=torch.bool)  # boxes that overlap would hide a gap from the sum above
        for box, part in found:
            first = tuple(max(one, other) for one, other in zip(box.offsets, offsets))
            inside = tuple(slice(start - base, start - base + size) for start, base, size in zip(first, offsets, part))
            result[inside] = self._inside(box, first, part)
            is_filled[inside] = True
        if not is_filled.all():
            raise DataError(f"{self.folder}: {key} is not whole: boxes of {list(tensor.shape)} overlap")
        return result

    def _inside(self, box: Box, offsets: Sizes, sizes: Sizes) -> Tensor:
        tensor = self._mapped(box)
        for dim, (start, size) in enumerate(zip(offsets, sizes)):
            tensor = tensor.narrow(dim, start - box.offsets[dim], size)
        return tensor

    def _mapped(self, box: Box) -> Tensor:
        if box.file not in self._maps:
            self._maps[box.file] = _map(self.folder / box.file)
        try:
            place = range(box.start, box.start + box.length)
            return mapped_tensor(self._maps[box.file], place, self.tensors[box.key].dtype, box.sizes)
        except FAULTS as fault:
            raise DataError(
                f"{self.folder / box.file}: {box.key} at byte {box.start} is damaged: {fault}; restore the file"
            ) from fault


def overlap(one: Box, other: Box) -> Sizes | None:
    """Size of what two boxes of one tensor share; None where they share nothing."""
    ends = [
        min(a + m, b + n) - max(a, b)
        for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    ]
    return tuple(ends) if all(end > 0 for end in ends) else None


def _map(path: Path) -> mmap.mmap:
    """Copy on write, so that torch may take it for writable memory; nothing is ever written."""
    try:
        with open_plain_file(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as fault:
        raise DataError(f"{path} cannot be read: {fault}; restore the checkpoint") from fault
