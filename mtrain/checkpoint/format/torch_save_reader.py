"""Locates a tensor inside its torch.save record, without reading or copying it.

A record is a zip file whose members are stored uncompressed: a pickle that describes the tensor, and its bytes. The
pickle may only describe one plain tensor.
"""

from __future__ import annotations

import io
import math
import mmap
import struct
import zipfile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtrain.base.tensor_slice import Sizes
from mtrain.checkpoint.format.inert_pickle import Built, Named, Saved, read_inert

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
    """Returns the tensor of a record as a view of the mapped file.

    Args:
        content: Mapping of the file.
        place: Range of bytes of the torch.save record.
        dtype: Dtype that the tensor must have.
        sizes: Shape that the tensor must have.

    Raises:
        ValueError: The record is damaged or holds something else; another of `FAULTS` may be raised as well.
    """
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
    # only the bytes of data.pkl are copied, at most _LONGEST_DESCRIPTION of them
    storage = _described(read_inert(content[description.start : description.stop], _ALLOWED))
    data = _member(content, place, members[f"data/{storage.key}"])
    # the metadata and the record state these independently: a mismatch means that one of them is damaged
    if storage.dtype != dtype or storage.shape != sizes:
        raise ValueError(f"it holds {storage.dtype} {list(storage.shape)} instead of {dtype} {list(sizes)}")
    # frombuffer refuses a count of 0
    if math.prod(sizes) == 0:
        return torch.empty(sizes, dtype=dtype)
    # the last element's place, in elements: under any strides the furthest one that is read
    last = sum((size - 1) * stride for size, stride in zip(storage.shape, storage.stride))
    begin = data.start + storage.offset * dtype.itemsize
    if begin + (last + 1) * dtype.itemsize > data.stop:
        raise ValueError("it is larger than its data")
    # frombuffer keeps the mapping alive as long as a tensor uses it
    flat = torch.frombuffer(content, dtype=dtype, count=last + 1, offset=begin)
    return flat.as_strided(storage.shape, storage.stride)


def _member(content: mmap.mmap, place: range, info: zipfile.ZipInfo) -> range:
    """Returns the range of bytes that a member of the zip file occupies in the file."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")
    header = place.start + info.header_offset
    # The local header, not the directory, says where the bytes begin: its extra field may be longer, as torch pads it
    # so that tensors are aligned.
    names = int.from_bytes(content[header + 26 : header + 28], "little")
    extra = int.from_bytes(content[header + 28 : header + 30], "little")
    start = header + 30 + names + extra
    if start + info.file_size > place.stop:
        raise ValueError(f"{info.filename} is cut")
    return range(start, start + info.file_size)


class _Slice(io.RawIOBase):
    """Part of a mapped file as a file of its own."""

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
