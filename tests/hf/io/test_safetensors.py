"""Headers of safetensors: what is accepted, and damage that once cost memory or a traceback."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from mtrain.base.errors import DataError
from mtrain.hf.io.safetensors import SafetensorsFile
from mtrain.hf.schema.header import read_header
from tests.fault_table import Notice

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DATA = bytes(8)


def joined(header: Any, data: bytes = DATA) -> bytes:
    """Builds a file from a header, which becomes JSON unless it is bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16), "none": torch.empty(0, 4)}
    (tmp_path / "file").write_bytes(save(tensors, {"format": "pt"}))
    file = SafetensorsFile(tmp_path / "file")
    assert file.metadata == {"format": "pt"}
    assert file.entries.keys() == read_header(tmp_path / "file").tensors.keys() == tensors.keys()
    for name, values in tensors.items():
        assert torch.equal(file.tensor(name), values)


DAMAGES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "header should have"),
    "header beyond the file": (joined({"a": ENTRY})[:20], "header should have"),
    "header of 2^64 bytes": (b"\xff" * 8 + b"{}", "header should have"),
    "deep": (joined(b"[" * 10**6), "nested too deeply"),
    "deep object": (joined(b'{"a":' * 10**6), "nested too deeply"),
    "deep entry": (joined(b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}"), "nested too deeply"),
    "an endless entry": (joined({"a": "x" * 70_000}), "is described as"),
    "number of 5,000 digits": (joined(b'{"a": ' + b"1" * 5000 + b"}"), "digits"),
    "a list": (joined([1]), "no JSON object"),
    "the same name twice": (joined(b'{"a": 1, "a": 2}'), "'a' stands there twice"),
    "many names, one twice": (
        joined(b"{" + b",".join(b'"n%d":1' % number for number in [*range(200_000), 199_999]) + b"}"),
        "'n199999' stands there twice",
    ),
    "NUL in a name": (joined({"a\0b": ENTRY}), "is not the name of a tensor"),
    "an endless name": (joined({"a" * 70_000: ENTRY}), "is not the name of a tensor"),
    "metadata of numbers": (joined({"__metadata__": {"a": 1}, "a": ENTRY}), "is not an object of texts"),
    "metadata in a list": (joined({"__metadata__": [], "a": ENTRY}), "is not an object of texts"),
    "huge size": (joined({"a": {**ENTRY, "shape": [10**30]}}), "cannot lie in bytes"),
    "100,000 huge axes": (joined({"a": {**ENTRY, "shape": [10**300] * 100_000}}), "cannot lie in bytes"),
    "100,000 axes": (joined({"a": {**ENTRY, "shape": [2**62] * 100_000}}), "cannot lie in bytes"),
    "huge place": (joined({"a": {**ENTRY, "data_offsets": [10**30, 10**30 + 8]}}), "cannot lie in bytes"),
    "negative place": (joined({"a": {**ENTRY, "data_offsets": [-8, 0]}}), "cannot lie in bytes"),
    "fractional size": (joined({"a": {**ENTRY, "shape": [2.0]}}), "cannot lie in bytes"),
    "a truth as size": (joined({"a": {**ENTRY, "shape": [True, 2]}}), "cannot lie in bytes"),
    "dtype as a list": (joined({"a": {**ENTRY, "dtype": []}}), "is described as"),
    "no numbers but text": (joined({"a": {**ENTRY, "data_offsets": "ab"}}), "cannot lie in bytes"),
}


@pytest.mark.fault(
    "folders",
    "safetensors header with huge sizes, deep nesting, repeated or unprintable names",
    happens="refused by one message that names the file and the tensor",
    exit_code=3,
)
@pytest.mark.parametrize(("content", "why"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_header_is_refused(tmp_path: Path, content: bytes, why: str, notice: Notice) -> None:
    (tmp_path / "file").write_bytes(content)
    with notice, pytest.raises(DataError, match=why) as error:
        SafetensorsFile(tmp_path / "file")
    assert error.value.exit_code == notice.exit_code
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("read", [read_header, SafetensorsFile])
@pytest.mark.parametrize("kind", ["nothing", "folder", "pipe"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, read: Any, kind: str) -> None:
    if kind != "nothing":
        (Path.mkdir if kind == "folder" else os.mkfifo)(tmp_path / "file")
    with pytest.raises(DataError, match="file cannot be read"):
        read(tmp_path / "file")


ONE = json.dumps(ENTRY).encode()


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": ' + ONE + b', "a": ' + ONE + b"}",
        b'{"": ' + ONE + b"}",
        b'{"a\\u0000b": ' + ONE + b"}",
        b'{"a\\u001b[31m": ' + ONE + b"}",
        b'{"' + b"a" * 100_000 + b'": ' + ONE + b"}",
        json.dumps({"a": {**ENTRY, "shape": [2] + [1] * 99}}).encode(),
    ],
    ids=["a name twice", "no name", "NUL", "escape", "long name", "100 axes"],
)
def test_what_the_library_lets_through_is_refused(tmp_path: Path, header: bytes) -> None:
    """The reader of our own exists for this: docs/adr/0025; when the library refuses one of these, check again."""
    path = tmp_path / "file.safetensors"
    path.write_bytes(joined(header))
    with safe_open(str(path), "numpy") as library:
        assert len(library.keys()) == 1
    with pytest.raises(DataError, match="is damaged"):
        SafetensorsFile(path)
