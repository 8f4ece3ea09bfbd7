"""Reads a checkpoint's global tensors without ranks; files are mapped, and tensors are views of them if possible.

A checkpoint may hold a global tensor in any number of slices. Tensors stay in the page cache and need no memory of
their own, unless they are assembled from several slices.

A slice is a torch.save record: an uncompressed zip file with a pickle that describes the tensor, and the tensor's
bytes. The pickle may only describe one plain tensor.
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
"""Largest description of a tensor in bytes; torch writes about 200."""


def mapped_tensor(content: mmap.mmap, record: range, dtype: torch.dtype, sizes: Sizes) -> Tensor:
    """Returns the tensor of shape `sizes` in a record's range of bytes, as a view of the mapped file; raises one of
    `FAULTS` for any other record."""
    # slices of a mapping stop at its end without an error, so a truncated file would look like a short record
    if record.stop > len(content):
        raise ValueError(f"the file ends after {len(content)} bytes")
    # zipfile reads only the directory at the end of the record, not the tensor
    with zipfile.ZipFile(_Slice(content, record.start, len(record))) as archive:
        # torch puts all members into a folder named after the file that it saved to
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    description = _member(content, record, members["data.pkl"])
    if len(description) > _LONGEST_DESCRIPTION:
        raise ValueError(f"its description has {len(description)} bytes")
    storage = _described(read_inert(content[description.start : description.stop], _ALLOWED))
    data = _member(content, record, members[f"data/{storage.key}"])
    # if they differ, the metadata or the record is damaged
    if storage.dtype != dtype or storage.shape != sizes:
        raise ValueError(f"it has {storage.dtype} {list(storage.shape)} instead of {dtype} {list(sizes)}")
    # frombuffer refuses a count of 0
    if math.prod(sizes) == 0:
        return torch.empty(sizes, dtype=dtype)
    # index of the last element under these strides
    last = sum((size - 1) * stride for size, stride in zip(storage.shape, storage.stride))
    begin = data.start + storage.offset * dtype.itemsize
    if begin + (last + 1) * dtype.itemsize > data.stop:
        raise ValueError("its tensor is larger than its data")
    # frombuffer keeps the mapping alive as long as a tensor uses it
    flat = torch.frombuffer(bytes_of(content), dtype=dtype, count=last + 1, offset=begin)
    return flat.as_strided(storage.shape, storage.stride)


def _member(content: mmap.mmap, record: range, info: zipfile.ZipInfo) -> range:
    """Returns the range of bytes that a member of the zip file occupies in the file."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")
    header = record.start + info.header_offset
    # the local header's extra field may be longer than the directory's, because torch pads it to align tensors
    names = int.from_bytes(content[header + 26 : header + 28], "little")
    extra = int.from_bytes(content[header + 28 : header + 30], "little")
    start = header + 30 + names + extra
    if start + info.file_size > record.stop:
        raise ValueError(f"{info.filename} is truncated")
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
    # `type is int`, because isinstance accepts True; a negative stride would read before the storage
    if any(type(number) is not int or number < 0 for number in (offset, *shape, *stride)):
        raise ValueError("its shape, stride or offset contains a negative value or not a number")
    return _Storage(key, _DTYPES[storage.name], offset, shape, stride)


class CheckpointTensors:
    """Tensors of a checkpoint, read slice by slice, without a copy if possible."""

    def __init__(self, folder: Path) -> None:
        """Opens a checkpoint; objects that are not tensors (Megatron-LM's random states) cannot be read."""
        self.folder = folder
        self._maps: dict[str, mmap.mmap] = {}
        self.tensors, self.non_tensors = read_metadata(folder)

    def read(self, key: str, region: TensorSlice) -> Tensor:
        """Reads a region of a global tensor: a view of the mapped file if one saved slice contains it, else a copy; do
        not write to it. Refuses damaged files, and saved slices that do not cover the region."""
        tensor = self.tensors[key]
        overlaps = [(saved, shared) for saved in tensor.slices if (shared := saved.at.intersect(region)) is not None]
        # no copy, for instance under the layout that saved it, so loading needs no memory besides the model
        if len(overlaps) == 1 and overlaps[0][1] == region:
            return self._inside(key, overlaps[0][0], region)
        # a cheap check before the result is allocated
        if sum(shared.num_elements for _, shared in overlaps) != region.num_elements:
            raise DataError(f"{self.folder}: {key} is incomplete: parts of {list(tensor.shape)} are missing")
        result = torch.empty(region.shape, dtype=tensor.dtype)
        is_filled = torch.zeros(region.shape, dtype=torch.bool)  # the sum misses a gap if slices overlap
        for saved, shared in overlaps:
            shared.within(region).of(result).copy_(self._inside(key, saved, shared))
            shared.within(region).of(is_filled).fill_(True)
        if not is_filled.all():
            raise DataError(f"{self.folder}: {key} is incomplete: slices of {list(tensor.shape)} overlap")
        return result

    def expect(self, key: str, region: TensorSlice) -> None:
        """Asks the system to read ahead the saved slices of a region that will be read soon."""
        for saved in self.tensors[key].slices:
            if saved.at.intersect(region) is not None:
                read_ahead(self._map_of(saved), saved.start_bytes, saved.start_bytes + saved.length_bytes)

    def _inside(self, key: str, saved: SavedSlice, region: TensorSlice) -> Tensor:
        return region.within(saved.at).of(self._mapped(key, saved))

    def _mapped(self, key: str, saved: SavedSlice) -> Tensor:
        content = self._map_of(saved)
        try:
            record = range(saved.start_bytes, saved.start_bytes + saved.length_bytes)
            return mapped_tensor(content, record, self.tensors[key].dtype, saved.at.shape)
        except FAULTS as fault:  # other programs' checkpoints have no checksums, so a record may contain anything
            raise DataError(
                f"{self.folder / saved.file}: {key} at byte {saved.start_bytes} is damaged: {fault}; restore the file"
            ) from fault

    def _map_of(self, saved: SavedSlice) -> mmap.mmap:
        # a file is mapped once and stays mapped, because callers hold views of it
        if saved.file not in self._maps:
            path = self.folder / saved.file
            try:
                self._maps[saved.file] = map_plain_file(path)
            except (OSError, ValueError) as fault:
                raise DataError(f"{path} cannot be read: {fault}; restore the checkpoint") from fault
        return self._maps[saved.file]
