"""JSON lines, and messages about bad ones."""

import json
from pathlib import Path

import pytest

from mtrain.base.errors import DataError
from mtrain.data.formats import jsonl
from mtrain.data.formats.jsonl import objects
from tests.fault_table import Notice


@pytest.mark.parametrize("ending", ["\n", ""])
def test_lines_are_read_in_order(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"n": n, "text": "é\n" * n}, ensure_ascii=False) for n in range(50)) + ending)
    assert list(objects(path)) == [(n + 1, {"n": n, "text": "é\n" * n}) for n in range(50)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"n": 1', r"a\.jsonl line 3: not JSON \("),
        (b"[1]", r"a\.jsonl line 3: holds a list, but a JSON object is needed"),
        (b"", r"a\.jsonl line 3: the line is empty"),
        (b'{"n": "\xe4"}', r"a\.jsonl line 3: byte 8 is not UTF-8"),
        (b'{"n": 1, "m": 2, "n": 3}', r"a\.jsonl line 3: not JSON \('n' stands there twice\)"),
        (b'{"n": NaN}', r"a\.jsonl line 3: not JSON \(NaN is no number\)"),
        (b'{"n": "\\ud800"}', r"a\.jsonl line 3: holds half a surrogate pair"),
        (b"[" * 100_000, r"a\.jsonl line 3: not JSON"),
    ],
)
@pytest.mark.fault(
    "input",
    "a line of JSON that is cut, empty, no object, of another encoding, or has a name twice",
    happens="refused with file and line",
    exit_code=3,
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str, notice: Notice) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 2}\n{"n": 4}\n' + line + b'\n{"n": 6}\n')
    with notice, pytest.raises(DataError, match=message) as error:
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
    with notice, pytest.raises(DataError, match=rf"a\.jsonl line 2: is longer than {jsonl.MAX_LINE_BYTES} bytes"):
        list(objects(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read: No such file"):
        list(objects(tmp_path / "a.jsonl"))
