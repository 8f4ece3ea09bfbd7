"""Opens a safetensors file, and checks its whole header before any tensor is read.

The header has the dtype, shape and position of each tensor; the tensors follow without gaps.
"""

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.plain_files import bytes_of, map_plain_file, read_ahead
from mtrain.base.tensor_slice import Sizes
from mtrain.hf.schema.files import METADATA, PREFIX_BYTES, Header, damage_named, read_header

_MOST_AXES = 64
_MOST_ELEMENTS = 1 << 63
_NAMES_SHOWN = 8
_LONGEST_SHOWN = 200
"""Limit on characters of a damaged entry in a message."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_UNREAD = ("F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "U16", "U32", "U64", "C64")
"""Other dtypes of the format (safetensors 0.8, `Dtype`), which encode other numbers or are not for weights."""


class TensorEntry(NamedTuple):
    dtype: torch.dtype
    shape: Sizes
    start: int
    """First byte in the file."""
    stop: int


class SafetensorsFile:
    """A memory-mapped file; its tensors are views of it."""

    def __init__(self, path: Path) -> None:
        """Reads and checks the header."""
        self.path = path
        header = read_header(path)
        with damage_named(path):
            self._content = map_plain_file(path)
        self._bytes = bytes_of(self._content)
        self.metadata = header.metadata
        self.entries = self._checked(header)
        """Name -> entry, in the order of the bytes."""

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor as a view of the file; do not write to it."""
        dtype, shape, start, stop = self.entries[name]
        # frombuffer refuses a count of 0
        if start == stop:
            return torch.empty(shape, dtype=dtype)
        # frombuffer keeps the mapping alive while a tensor uses it
        return torch.frombuffer(self._bytes, dtype=dtype, count=math.prod(shape), offset=start).view(shape)

    def expect(self, name: str) -> None:
        """Asks the system to read a tensor ahead."""
        entry = self.entries[name]
        read_ahead(self._content, entry.start, entry.stop)

    def _checked(self, header: Header) -> dict[str, TensorEntry]:
        entries = {name: self._entry(name, description, header.end) for name, description in header.tensors.items()}
        # by position, so that reads are sequential, and gaps or overlaps show between neighbours
        ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
        end = header.end
        for name, entry in ordered.items():
            # the format requires it: a gap could hide content, and an overlap would give one memory two names
            if entry.start != end:
                self._refuse(f"{name} begins at byte {entry.start} instead of {end}, but tensors must not have gaps")
            end = entry.stop
        if end != len(self._content):
            self._refuse(f"its tensors end at byte {end}, but the file has {len(self._content)}")
        return ordered

    def _entry(self, name: str, description: Any, data_start: int) -> TensorEntry:
        if isinstance(description, dict) and description.get("dtype") in _UNREAD:
            raise DataError(
                f"{self.path}: {name} is {description['dtype']}, which is not supported; use weights in BF16, F16, F32 "
                "or F64, or in F8_E4M3 with scales"
            )
        try:
            dtype, shape, (start, stop) = (
                _DTYPES[description["dtype"]],
                tuple(description["shape"]),
                description["data_offsets"],
            )
            # checks types before it multiplies, because "2" * 3 and True would pass
            numbers = (*shape, start, stop)
            is_sound = all(type(number) is int and 0 <= number < _MOST_ELEMENTS for number in numbers)
        except (KeyError, TypeError, ValueError):
            self._refuse(f"{name} is described as {_shown(description)}, which is not valid")
        if not is_sound or len(shape) > _MOST_AXES or stop - start != math.prod(shape) * dtype.itemsize:
            self._refuse(
                f"{name} of shape {_shown(list(shape))} and {dtype} does not fit bytes {_shown([start, stop])}"
            )
        return TensorEntry(dtype, shape, data_start + start, data_start + stop)

    def _refuse(self, reason: str) -> NoReturn:
        raise DataError(f"{self.path} is damaged: {reason}; download it again")


def header_of(tensors: Mapping[str, tuple[torch.dtype, Sizes]], metadata: Mapping[str, str]) -> bytes:
    """Builds a file's prefix and header from name -> dtype and shape of its tensors, in the order of writing."""
    content: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    # formats JSON like the library, so that exporting an import gives the same file, byte for byte
    header = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    # aligns the tensors to 8 bytes, like the library
    header += b" " * (-len(header) % PREFIX_BYTES)
    return len(header).to_bytes(PREFIX_BYTES, "little") + header


def raw_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor, without a copy."""
    flat = tensor.detach().view(-1)
    # uint8, because numpy has no bfloat16
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors agree in dtype, shape and every bit."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    # bytes, because nan differs from itself and 0.0 equals -0.0
    mine, theirs = (np.frombuffer(raw_bytes(tensor.contiguous()), np.uint8) for tensor in (one, other))
    words = mine.size // 8 * 8  # 64-bit words compare four times as fast
    has_same_words = np.array_equal(mine[:words].view(np.int64), theirs[:words].view(np.int64))
    return has_same_words and np.array_equal(mine[words:], theirs[words:])


def shown_names(names: Sequence[str]) -> str:
    """Lists the first few names for a message."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _shown(value: Any) -> str:
    """Returns the beginning of a value's text, however large or deep the value is."""
    return reprlib.repr(value)[:_LONGEST_SHOWN]
