"""Global tensors of a checkpoint without ranks: memory-mapped reading, streamed writing.

The format is torch_dist: data files that hold tensors one after another, each as torch.save writes it, and a list of
which part of which global tensor lies where. A global tensor may lie there in any number of boxes, so nothing larger
than one box is ever in memory, and a box that is read stays in the page cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import mmap
import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mtrain.checkpoint.envelope import FAULTS, Sizes, mapped_tensor
from mtrain.checkpoint.safe_load import verified_reader
from mtrain.errors import DataError

METADATA_NAME = ".metadata"


class Box(NamedTuple):
    """A part of a global tensor and where its bytes lie."""

    key: str
    offsets: Sizes
    sizes: Sizes
    file: str
    start: int
    """First byte in the file."""
    length: int
    """Bytes, with the envelope of torch.save."""


class GlobalTensor(NamedTuple):
    """What the list says of one tensor."""

    dtype: torch.dtype
    shape: Sizes
    boxes: tuple[Box, ...]


class CheckpointTensors:
    """The tensors of a checkpoint, read box by box without copying where that is possible."""

    def __init__(self, folder: Path) -> None:
        """Opens a checkpoint; what is not a tensor (random states of foreign checkpoints) is left out.

        Raises:
            DataError: The list of tensors is missing, damaged, or would run code.
        """
        self.folder = folder
        self._maps: dict[str, mmap.mmap] = {}
        metadata = verified_reader(folder).metadata
        self.tensors = {
            key: GlobalTensor(facts.properties.dtype, tuple(facts.size), _boxes(key, facts, metadata))
            for key, facts in metadata.state_dict_metadata.items()
            if isinstance(facts, TensorStorageMetadata)
        }

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
        for box, part in found:
            first = tuple(max(one, other) for one, other in zip(box.offsets, offsets))
            target = result
            for dim, (start, size) in enumerate(zip(first, part)):
                target = target.narrow(dim, start - offsets[dim], size)
            target.copy_(self._inside(box, first, part))
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


class BoxWriter:
    """Writes boxes one after another into one data file and computes its checksum on the way."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Args:
        file: New, opened for writing.
        name: Of the file inside the checkpoint.
        """
        self._file, self._name = _Hashed(file), name
        self.boxes: list[Box] = []

    @property
    def sha256(self) -> str:
        """Of what was written so far, in hex."""
        return self._file.digest.hexdigest()

    def write(self, key: str, offsets: Sizes, values: Tensor) -> None:
        """Appends one box; OSError as the disk gives it.

        Args:
            key: Name of the global tensor.
            offsets: Where the box begins in it.
            values: The box, contiguous.
        """
        start = self._file.position
        torch.save(_alone(values), self._file)  # type: ignore[arg-type]
        self.boxes.append(Box(key, offsets, tuple(values.shape), self._name, start, self._file.position - start))


@contextlib.contextmanager
def without_inner_checksums() -> Iterator[None]:
    """torch.save leaves out checksums that nothing reads, inside the block and in all threads; it is twice as fast."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _alone(values: Tensor) -> Tensor:
    """The same memory as a tensor without neighbours, since torch.save writes the whole storage of a view."""
    assert values.is_contiguous()
    if values.untyped_storage().nbytes() == values.nbytes or values.numel() == 0:
        return values if values.numel() else values.clone()
    raw = values.detach().view(-1).view(torch.uint8).numpy().data
    return torch.frombuffer(raw, dtype=values.dtype).view(values.shape)


class _Hashed(io.RawIOBase):
    """A file to write to that knows its checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        self.digest.update(content)
        self._file.write(content)
        self.position += len(content)
        return len(content)


class Declared(NamedTuple):
    """A global tensor that is going to be written."""

    dtype: torch.dtype
    shape: Sizes


def write_tensor_list(folder: Path, tensors: dict[str, Declared], boxes: Iterable[Box]) -> None:
    """Writes what makes data files a checkpoint that torch and megatron-core can read.

    Args:
        folder: Where the data files lie.
        tensors: Every global tensor.
        boxes: Every box; together they cover the tensors.
    """
    by_key: dict[str, list[Box]] = {key: [] for key in tensors}
    for box in boxes:
        by_key[box.key].append(box)
    for key, held in by_key.items():
        missing = math.prod(tensors[key].shape) - sum(math.prod(box.sizes) for box in held)
        assert missing == 0, f"{missing} elements of {key} were not written"
    metadata = Metadata(
        state_dict_metadata={key: _saved_facts(tensors[key], held) for key, held in by_key.items()},
        storage_data={
            MetadataIndex(key, torch.Size(box.offsets)): _StorageInfo(box.file, box.start, box.length)
            for key, held in by_key.items()
            for box in held
        },
    )
    with (folder / METADATA_NAME).open("wb") as file:
        pickle.dump(metadata, file)
    torch.save({}, folder / "common.pt")  # megatron-core asks for both
    kind = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    common = {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(kind | common), encoding="utf-8")


def _saved_facts(tensor: Declared, boxes: Sequence[Box]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
    return TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)


def _boxes(key: str, facts: TensorStorageMetadata, metadata: Metadata) -> tuple[Box, ...]:
    boxes = []
    for chunk in facts.chunks:
        place = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
        if place is None:
            raise DataError(f"the checkpoint's list names no file for a part of {key}; restore the checkpoint")
        sizes = tuple(chunk.sizes)
        boxes.append(Box(key, tuple(chunk.offsets), sizes, place.relative_path, place.offset, place.length))
    return tuple(boxes)


def _map(path: Path) -> mmap.mmap:
    """Copy on write, so that torch may take it for writable memory; nothing is ever written."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as fault:
        raise DataError(f"{path} cannot be read: {fault}; restore the checkpoint") from fault
