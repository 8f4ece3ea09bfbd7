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
from mtrain.hf.schema.files import read_header
from tests.fault_table import Notice
from tests.messages import refuses

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


def test_a_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    """The system keeps room for pages that may be written to, even in a private mapping, and refused one of 51 GB."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes_kb = {name: int(size) for name, size, *_ in lines}
    size_bytes = (sizes_kb["MemTotal:"] + sizes_kb["SwapTotal:"]) * 1024 + (1 << 30)
    header = joined({"a": {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}, b"")
    with (tmp_path / "file").open("wb") as file:  # sparse: it takes a page of the disk
        file.write(header)
        file.seek(len(header) + size_bytes - 1)
        file.write(b"\7")
    found = SafetensorsFile(tmp_path / "file").tensor("a")
    assert found[-2:].tolist() == [0, 7]


def test_metadata_may_be_null(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(joined({"__metadata__": None, "a": ENTRY}))
    with safe_open(str(tmp_path / "file"), "numpy") as library:
        assert library.metadata() is None
    assert SafetensorsFile(tmp_path / "file").metadata == {}


DAMAGES: dict[str, bytes] = {
    "empty": b"",
    "header beyond the file": joined({"a": ENTRY})[:20],
    "header of 2^64 bytes": b"\xff" * 8 + b"{}",
    "deep": joined(b"[" * 10**6),
    "deep object": joined(b'{"a":' * 10**6),
    "deep entry": joined(b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}"),
    "an endless entry": joined({"a": "x" * 70_000}),
    "number of 5,000 digits": joined(b'{"a": ' + b"1" * 5000 + b"}"),
    "a list": joined([1]),
    "the same name twice": joined(b'{"a": 1, "a": 2}'),
    "many names, one twice": joined(b"{%s}" % b",".join(b'"n%d":1' % number for number in [*range(200_000), 199_999])),
    "NUL in a name": joined({"a\0b": ENTRY}),
    "an endless name": joined({"a" * 70_000: ENTRY}),
    "metadata of numbers": joined({"__metadata__": {"a": 1}, "a": ENTRY}),
    "metadata in a list": joined({"__metadata__": [], "a": ENTRY}),
    "huge size": joined({"a": {**ENTRY, "shape": [10**30]}}),
    "100,000 huge axes": joined({"a": {**ENTRY, "shape": [10**300] * 100_000}}),
    "100,000 axes": joined({"a": {**ENTRY, "shape": [2**62] * 100_000}}),
    "huge place": joined({"a": {**ENTRY, "data_offsets": [10**30, 10**30 + 8]}}),
    "negative place": joined({"a": {**ENTRY, "data_offsets": [-8, 0]}}),
    "fractional size": joined({"a": {**ENTRY, "shape": [2.0]}}),
    "a truth as size": joined({"a": {**ENTRY, "shape": [True, 2]}}),
    "dtype as a list": joined({"a": {**ENTRY, "dtype": []}}),
    "no numbers but text": joined({"a": {**ENTRY, "data_offsets": "ab"}}),
}


@pytest.mark.fault(
    "folders",
    "safetensors header with huge sizes, deep nesting, repeated or unprintable names",
    happens="refused by one message that names the file and the tensor",
    exit_code=3,
)
@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_header_is_refused(tmp_path: Path, content: bytes, notice: Notice) -> None:
    (tmp_path / "file").write_bytes(content)
    with notice, refuses(DataError) as error:
        SafetensorsFile(tmp_path / "file")
    assert error.value.exit_code == notice.exit_code
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("read", [read_header, SafetensorsFile])
@pytest.mark.parametrize("kind", ["nothing", "folder", "pipe"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, read: Any, kind: str) -> None:
    if kind != "nothing":
        (Path.mkdir if kind == "folder" else os.mkfifo)(tmp_path / "file")
    with refuses(DataError):
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
    with refuses(DataError):
        SafetensorsFile(path)
