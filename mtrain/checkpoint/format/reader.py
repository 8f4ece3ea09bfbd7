"""Reader of a checkpoint's global tensors without ranks: files are mapped, and tensors are views where they can be.

A checkpoint may hold a global tensor in any number of slices. What is read stays in the page cache and takes no memory
of its own, unless it has to be assembled from several slices.

A slice is a record of torch.save: an uncompressed zip file of a pickle that describes the tensor, and its bytes. The
pickle may only describe one plain tensor.
"""

import io
import math
import mmap
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.plain_files import bytes_of, map_plain_file, read_ahead
from mtrain.base.tensor_slice import Sizes, TensorSlice
from mtrain.checkpoint.format.safe_metadata import Built, Named, Saved, SavedSlice, read_inert, read_metadata

FAULTS = (
    *(ValueError, KeyError, IndexError, EOFError, TypeError, OverflowError, MemoryError),
    *(RuntimeError, struct.error, zipfile.BadZipFile),
)
"""Errors that a damaged record raises, including those of zipfile and torch."""
_TENSOR, _NO_HOOKS = "torch._utils._rebuild_tensor_v2", "collections.OrderedDict"
_DTYPES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
_ALLOWED = {*_DTYPES, _TENSOR, _NO_HOOKS}
_LONGEST_DESCRIPTION = 1 << 16
"""Largest size of a tensor's description in bytes; torch writes about 200."""


def mapped_tensor(content: mmap.mmap, place: range, dtype: torch.dtype, sizes: Sizes) -> Tensor:
    """Returns the tensor of a record, which must have the shape `sizes`, as a view of the mapped file; raises one of
    `FAULTS` for any other record."""
    # slices of a mapping stop at its end without an error, so a cut file would look like a short record
    if place.stop > len(content):
        raise ValueError(f"the file ends after {len(content)} bytes")
    # zipfile only reads the directory at the end of the record, not the tensor
    with zipfile.ZipFile(_Slice(content, place.start, len(place))) as archive:
        # torch puts all members below a folder, whose name depends on the file that it saved to
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    description = _member(content, place, members["data.pkl"])
    if len(description) > _LONGEST_DESCRIPTION:
        raise ValueError(f"its description has {len(description)} bytes")
    storage = _described(read_inert(content[description.start : description.stop], _ALLOWED))
    data = _member(content, place, members[f"data/{storage.key}"])
    # a mismatch means that the metadata or the record is damaged
    if storage.dtype != dtype or storage.shape != sizes:
        raise ValueError(f"it holds {storage.dtype} {list(storage.shape)} instead of {dtype} {list(sizes)}")
    # frombuffer refuses a count of 0
    if math.prod(sizes) == 0:
        return torch.empty(sizes, dtype=dtype)
    # the furthest element that is read under these strides
    last = sum((size - 1) * stride for size, stride in zip(storage.shape, storage.stride))
    begin = data.start + storage.offset * dtype.itemsize
    if begin + (last + 1) * dtype.itemsize > data.stop:
        raise ValueError("it is larger than its data")
    # frombuffer keeps the mapping alive as long as a tensor uses it
    flat = torch.frombuffer(bytes_of(content), dtype=dtype, count=last + 1, offset=begin)
    return flat.as_strided(storage.shape, storage.stride)


def _member(content: mmap.mmap, place: range, info: zipfile.ZipInfo) -> range:
    """Returns the range of bytes that a member of the zip file occupies in the file."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")
    header = place.start + info.header_offset
    # the local header's extra field may be longer than the directory's, as torch pads it to align tensors
    names = int.from_bytes(content[header + 26 : header + 28], "little")
    extra = int.from_bytes(content[header + 28 : header + 30], "little")
    start = header + 30 + names + extra
    if start + info.file_size > place.stop:
        raise ValueError(f"{info.filename} is cut")
    return range(start, start + info.file_size)


class _Slice(io.RawIOBase):
    """Part of a mapped file as a separate file."""

    def __init__(self, content: mmap.mmap, start: int, length: int) -> None:
        self._content, self._start, self._length, self._position = content, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = (0, self._position, self._length)[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = self._length if size < 0 else min(self._position + size, self._length)
        data = self._content[self._start + self._position : self._start + end]
        self._position += len(data)
        return data


class _Storage(NamedTuple):
    """Description of a tensor in a torch.save record."""

    key: str
    dtype: torch.dtype
    offset: int
    """Offset into the storage, in elements."""
    shape: Sizes
    stride: Sizes


def _described(content: Any) -> _Storage:
    """Checks the description and returns its values; every number in it is 0 or more."""
    if not isinstance(content, Built) or content.name != _TENSOR or len(content.arguments) != 6:
        raise ValueError("it is not a tensor")
    saved, offset, shape, stride, _, _ = content.arguments
    if not isinstance(saved, Saved) or not isinstance(saved.id, tuple) or len(saved.id) != 5:
        raise ValueError("it is not a tensor")
    kind, storage, key, _, _ = saved.id
    if kind != "storage" or not isinstance(storage, Named) or storage.name not in _DTYPES or not isinstance(key, str):
        raise ValueError("it is not a tensor")
    if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(shape) != len(stride):
        raise ValueError("it has no shape")
    # `type is int`, as True is an int; a negative stride would read before the storage
    if any(type(number) is not int or number < 0 for number in (offset, *shape, *stride)):
        raise ValueError("it has a negative stride or offset, or one that is no number")
    return _Storage(key, _DTYPES[storage.name], offset, shape, stride)


class CheckpointTensors:
    """Tensors of a checkpoint, read slice by slice without copying where that is possible."""

    def __init__(self, folder: Path) -> None:
        """Opens a checkpoint; objects that are not tensors (random states that Megatron-LM saves) cannot be read."""
        self.folder = folder
        self._maps: dict[str, mmap.mmap] = {}
        self.tensors, self.others = read_metadata(folder)

    def read(self, key: str, wanted: TensorSlice) -> Tensor:
        """Reads one slice of a global tensor: a view of the mapped file where one saved slice holds all of it, else a
        copy; it must not be written to. Refuses a file that is cut or damaged, and saved slices that do not cover the
        wanted one."""
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
        """Asks the system to read ahead the saved slices of one that will be read soon."""
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
            path = self.folder / saved.file
            try:
                self._maps[saved.file] = map_plain_file(path)
            except (OSError, ValueError) as fault:
                raise DataError(f"{path} cannot be read: {fault}; restore the checkpoint") from fault
        return self._maps[saved.file]
