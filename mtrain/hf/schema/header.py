"""The header of a safetensors file: its tensors and their places, without torch and without reading the tensors.

Format: eight bytes with the length of a JSON object, the object, then the tensors
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.base.errors import DataError
from mtrain.base.plain_files import open_plain_file, parsed_json
from mtrain.hf.schema.files import is_tensor_name

PREFIX_BYTES = 8
METADATA = "__metadata__"
_LONGEST_BYTES = 100_000_000
"""Largest length of a header in the format."""


class Header(NamedTuple):
    """Content of a header; places and shapes are not checked here."""

    metadata: dict[str, str]
    """Free text, by name."""
    tensors: dict[str, Any]
    """Name -> unchecked description of a tensor."""
    end: int
    """Number of the first byte after the header; places count from here."""
    size_bytes: int
    """Size of the file."""


def read_header(path: Path) -> Header:
    """Reads only the header.

    Raises:
        DataError: The file cannot be read or is damaged.
    """
    try:
        with open_plain_file(path) as file:
            size = os.fstat(file.fileno()).st_size  # size of the open file: the path may name another file by now
            length = int.from_bytes(file.read(PREFIX_BYTES), "little")
            # checked before the header is read: the length comes from the file and decides how much memory is taken; {}
            # has 2 bytes
            if not 2 <= length <= min(_LONGEST_BYTES, size - PREFIX_BYTES):
                raise ValueError(f"its header should have {length} bytes, but the file has {size}")
            content = parsed_json(file.read(length))
        if not isinstance(content, dict):
            raise ValueError("its header is no JSON object")
        metadata = content.pop(METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError(f"{METADATA} is not an object of texts")
        for name in content:
            if not is_tensor_name(name):
                raise ValueError(f"{name[:100]!r} is not the name of a tensor")
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}; download it again") from fault
    except ValueError as fault:
        raise DataError(f"{path} is damaged: {fault}; download it again") from fault
    return Header(metadata, content, PREFIX_BYTES + length, size)
