"""Reader of a checkpoint's global tensors without ranks: files are mapped, and tensors are views of them where
possible.

A checkpoint may hold a global tensor in any number of slices. What is read stays in the page cache and takes no memory
of its own, unless it has to be assembled from several slices.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.plain_files import open_plain_file, read_ahead
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.safe_metadata import SavedSlice, read_metadata
from mtrain.checkpoint.format.torch_save_reader import FAULTS, mapped_tensor


class CheckpointTensors:
    """Tensors of a checkpoint, read slice by slice without copying where that is possible."""

    def __init__(self, folder: Path) -> None:
        """Opens a checkpoint; objects that are not tensors (random states that Megatron-LM saves) cannot be read.

        Raises:
            DataError: The metadata is missing, damaged, or would run code.
        """
        self.folder = folder
        self._maps: dict[str, mmap.mmap] = {}
        self.tensors, self.others = read_metadata(folder)

    def read(self, key: str, wanted: TensorSlice) -> Tensor:
        """Reads one slice of a global tensor.

        Args:
            key: Name of the tensor.
            wanted: Slice to read.

        Returns:
            Tensor of the slice's shape: a view of the mapped file where one saved slice holds all of it, else a copy.
            It must not be written to.

        Raises:
            DataError: A file is cut or damaged, or the saved slices do not cover the wanted one.
        """
        tensor = self.tensors[key]
        found = [(saved, shared) for saved in tensor.slices if (shared := saved.at.intersect(wanted)) is not None]
        # no copy, for instance under the layout that saved it: loading then needs no memory besides the model
        if len(found) == 1 and found[0][1] == wanted:
            return self._inside(key, found[0][0], wanted)
        # cheap, and before memory is taken for the result
        if sum(shared.num_elements for _, shared in found) != wanted.num_elements:
            raise DataError(f"{self.folder}: {key} is not whole: parts of {list(tensor.shape)} are missing")
        result = torch.empty(wanted.shape, dtype=tensor.dtype)
        is_filled = torch.zeros(wanted.shape, dtype=torch.bool)  # overlapping slices could hide a gap from the sum
        for saved, shared in found:
            shared.within(wanted).of(result).copy_(self._inside(key, saved, shared))
            shared.within(wanted).of(is_filled).fill_(True)
        if not is_filled.all():
            raise DataError(f"{self.folder}: {key} is not whole: slices of {list(tensor.shape)} overlap")
        return result

    def expect(self, key: str, wanted: TensorSlice) -> None:
        """Asks the system to read ahead the saved slices of one that will be read soon.

        Raises:
            DataError: A file cannot be read.
        """
        for saved in self.tensors[key].slices:
            if saved.at.intersect(wanted) is not None:
                read_ahead(self._map_of(saved), saved.start_bytes, saved.start_bytes + saved.length_bytes)

    def _inside(self, key: str, saved: SavedSlice, wanted: TensorSlice) -> Tensor:
        return wanted.within(saved.at).of(self._mapped(key, saved))

    def _mapped(self, key: str, saved: SavedSlice) -> Tensor:
        content = self._map_of(saved)
        try:
            record = range(saved.start_bytes, saved.start_bytes + saved.length_bytes)
            return mapped_tensor(content, record, self.tensors[key].dtype, saved.at.shape)
        except FAULTS as fault:  # the bytes have a checksum only in our own checkpoints, so a record may hold anything
            raise DataError(
                f"{self.folder / saved.file}: {key} at byte {saved.start_bytes} is damaged: {fault}; restore the file"
            ) from fault

    def _map_of(self, saved: SavedSlice) -> mmap.mmap:
        # a file is mapped once and stays mapped: views of it are handed out
        if saved.file not in self._maps:
            self._maps[saved.file] = _map(self.folder / saved.file)
        return self._maps[saved.file]


def _map(path: Path) -> mmap.mmap:
    """Maps a file copy-on-write, so that torch may take it for writable memory; nothing is ever written."""
    try:
        with open_plain_file(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as fault:
        raise DataError(f"{path} cannot be read: {fault}; restore the checkpoint") from fault
