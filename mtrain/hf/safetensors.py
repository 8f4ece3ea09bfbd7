"""One safetensors file: its header is checked completely before a byte of a tensor is touched.

Format: eight bytes with the length of a JSON header, the header with dtype, shape and place of each tensor, then the
tensors one after another without gaps (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from mtrain.errors import DataError
from mtrain.hf.axes import Sizes

_LONGEST_HEADER_BYTES = 100_000_000
_PREFIX_BYTES = 8
_METADATA = "__metadata__"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Entry(NamedTuple):
    """What the header says of one tensor."""

    dtype: torch.dtype
    shape: Sizes
    start: int
    """First byte in the file."""
    stop: int


class SafetensorsFile:
    """A file that is mapped; its tensors are views of it."""

    def __init__(self, path: Path) -> None:
        """Reads and checks the header.

        Raises:
            DataError: The file is cut or damaged.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # never written to
        except (OSError, ValueError) as fault:
            raise DataError(f"{path} cannot be read: {fault}; download it again") from fault
        self.metadata: dict[str, str] = {}
        """Free text of the header."""
        self.entries = self._read_header()
        """Name -> entry, in the order of the bytes."""

    def tensor(self, name: str) -> Tensor:
        """One tensor as a view of the file; not to be written to."""
        dtype, shape, start, stop = self.entries[name]
        if start == stop:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._content, dtype=dtype, count=math.prod(shape), offset=start).view(shape)

    def _read_header(self) -> dict[str, Entry]:
        size = len(self._content)
        length = int.from_bytes(self._content[:_PREFIX_BYTES], "little")
        if size < _PREFIX_BYTES or not 2 <= length <= min(_LONGEST_HEADER_BYTES, size - _PREFIX_BYTES):
            self._refuse(f"its header should have {length} bytes, but the file has {size}")
        try:
            content = json.loads(
                self._content[_PREFIX_BYTES : _PREFIX_BYTES + length].decode(), object_pairs_hook=_without_duplicates
            )
        except ValueError as fault:
            self._refuse(f"its header is not JSON: {fault}")
        if not isinstance(content, dict):
            self._refuse("its header is no JSON object")
        self.metadata = content.pop(_METADATA, {})
        entries = {name: self._entry(name, said, _PREFIX_BYTES + length) for name, said in content.items()}
        ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
        end = _PREFIX_BYTES + length
        for name, entry in ordered.items():
            if entry.start != end:
                self._refuse(f"{name} begins at byte {entry.start}, but {end} is needed: tensors lie without gaps")
            end = entry.stop
        if end != size:
            self._refuse(f"its tensors end at byte {end}, but the file has {size}")
        return ordered

    def _entry(self, name: str, said: Any, data_start: int) -> Entry:
        try:
            dtype, shape, (start, stop) = _DTYPES[said["dtype"]], tuple(said["shape"]), said["data_offsets"]
            is_sound = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        except (KeyError, TypeError, ValueError):
            self._refuse(f"{name} is described as {said!r}, which is not understood")
        if not is_sound or stop - start != math.prod(shape) * dtype.itemsize:
            self._refuse(f"{name} of shape {list(shape)} and {dtype} cannot lie in bytes {start} to {stop}")
        return Entry(dtype, shape, data_start + start, data_start + stop)

    def _refuse(self, reason: str) -> NoReturn:
        raise DataError(f"{self.path} is damaged: {reason}; download it again")


def header_of(tensors: Mapping[str, tuple[torch.dtype, Sizes]], metadata: Mapping[str, str]) -> bytes:
    """Prefix and header of a file.

    Args:
        tensors: Name -> dtype and shape, in the order in which they will be written.
        metadata: Free text.
    """
    content: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % _PREFIX_BYTES)
    return len(header).to_bytes(_PREFIX_BYTES, "little") + header


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without copying."""
    flat = tensor.detach().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise ValueError(f"{twice!r} stands there twice")
    return content
