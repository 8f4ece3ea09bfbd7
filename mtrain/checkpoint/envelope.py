"""Finds a tensor inside the envelope that torch.save puts around it, without reading or copying it.

The envelope is a zip file whose members are stored as they are: a pickle that describes the tensor, and its bytes. Of
the pickle only the description of one plain tensor is accepted.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import zipfile
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Sizes: TypeAlias = tuple[int, ...]
FAULTS = (ValueError, KeyError, IndexError, EOFError, TypeError, zipfile.BadZipFile, pickle.UnpicklingError)
"""What a damaged envelope raises."""


def mapped_tensor(content: mmap.mmap, place: range, dtype: torch.dtype, sizes: Sizes) -> Tensor:
    """A view of the mapped file.

    Args:
        content: The file.
        place: Its bytes that torch.save wrote.
        dtype: What the tensor must be.
        sizes: Its shape must be.

    Raises:
        ValueError: Or another of `FAULTS`: the envelope is damaged or holds something else.
    """
    if place.stop > len(content):
        raise ValueError(f"the file ends after {len(content)} bytes")
    with zipfile.ZipFile(_Slice(content, place.start, len(place))) as archive:
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    description = _member(content, place, members["data.pkl"])
    storage = _StorageReader(io.BytesIO(content[description.start : description.stop])).load()
    data = _member(content, place, members[f"data/{storage.key}"])
    if storage.dtype != dtype or storage.shape != sizes:
        raise ValueError(f"it holds {storage.dtype} {list(storage.shape)} instead of {dtype} {list(sizes)}")
    if math.prod(sizes) == 0:
        return torch.empty(sizes, dtype=dtype)
    last = sum((size - 1) * stride for size, stride in zip(storage.shape, storage.stride))
    if min(storage.stride, default=0) < 0 or storage.offset < 0:
        raise ValueError("it has a negative stride or offset")
    begin = data.start + storage.offset * dtype.itemsize
    if begin + (last + 1) * dtype.itemsize > data.stop:
        raise ValueError("it is larger than its data")
    flat = torch.frombuffer(content, dtype=dtype, count=last + 1, offset=begin)
    return flat.as_strided(storage.shape, storage.stride)


def _member(content: mmap.mmap, place: range, info: zipfile.ZipInfo) -> range:
    """Bytes of the file that a member of the zip file occupies."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")
    header = place.start + info.header_offset
    names = int.from_bytes(content[header + 26 : header + 28], "little")
    extra = int.from_bytes(content[header + 28 : header + 30], "little")
    start = header + 30 + names + extra
    if start + info.file_size > place.stop:
        raise ValueError(f"{info.filename} is cut")
    return range(start, start + info.file_size)


class _Slice(io.RawIOBase):
    """A part of a mapped file as a file of its own."""

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
    """What torch.save says of a tensor."""

    key: str
    dtype: torch.dtype
    offset: int
    """In elements."""
    shape: Sizes
    stride: Sizes


class _StorageReader(pickle.Unpickler):
    """Reads the description of one tensor; anything else is refused."""

    def persistent_load(self, saved_id: Any) -> tuple[str, torch.dtype]:
        kind, dtype, key, _, _ = saved_id
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError("it is not a tensor")
        return str(key), dtype

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _described
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")


_STORAGE_DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def _described(
    storage: tuple[str, torch.dtype], offset: int, shape: Sizes, stride: Sizes, requires_grad: bool, hooks: Any
) -> _Storage:
    return _Storage(storage[0], storage[1], int(offset), tuple(shape), tuple(stride))
