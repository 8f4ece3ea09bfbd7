"""JSON lines, and messages about bad ones."""

import json
from pathlib import Path

import pytest

from mtrain.base.errors import DataError
from mtrain.data.formats import jsonl
from mtrain.data.formats.jsonl import objects
from tests.fault_table import Notice
from tests.messages import refuses


@pytest.mark.parametrize("ending", ["\n", ""])
def test_lines_are_read_in_order(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"n": n, "text": "é\n" * n}, ensure_ascii=False) for n in range(50)) + ending)
    assert list(objects(path)) == [(n + 1, {"n": n, "text": "é\n" * n}) for n in range(50)]


@pytest.mark.parametrize(
    "line",
    [
        b'{"n": 1',
        b"[1]",
        b"",
        b'{"n": "\xe4"}',
        b'{"n": 1, "m": 2, "n": 3}',
        b'{"n": NaN}',
        b'{"n": "\\ud800"}',
        b"[" * 100_000,
    ],
)
@pytest.mark.fault(
    "input",
    "a line of JSON that is cut, empty, no object, of another encoding, or has a name twice",
    happens="refused with file and line",
    exit_code=3,
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, notice: Notice) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 2}\n{"n": 4}\n' + line + b'\n{"n": 6}\n')
    with notice, refuses(DataError) as error:
        list(objects(path))
    assert error.value.exit_code == notice.exit_code


@pytest.mark.fault(
    "input",
    "a line of 100 MB",
    happens="refused with file and line before it fills the memory",
    exit_code=3,
)
def test_a_huge_line_is_refused_before_it_fills_the_memory(tmp_path: Path, notice: Notice) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"n": 2}\n')
        file.truncate(100 * 2**20)
    with notice, refuses(DataError, "a.jsonl", "line 2", str(jsonl.MAX_LINE_BYTES)):
        list(objects(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refuses(DataError, "a.jsonl"):
        list(objects(tmp_path / "a.jsonl"))
