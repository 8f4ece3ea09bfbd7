"""JSON lines: random access, and what is said of bad ones."""

import json
from pathlib import Path

import pytest

from mtrain.base.errors import DataError
from mtrain.data.formats import jsonl
from mtrain.data.formats.jsonl import Lines, objects


def accept(found: dict[str, object]) -> None:
    """Every object is good."""


def refuse_odd(found: dict[str, object]) -> None:
    """Numbers must be even."""
    if int(str(found["n"])) % 2:
        raise DataError("'n' is odd; make it even")


@pytest.mark.parametrize("ending", ["\n", ""])
def test_lines_are_read_in_any_order(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"n": n, "text": "é\n" * n}, ensure_ascii=False) for n in range(50)) + ending)
    lines = Lines(path, accept)
    assert len(lines) == 50
    assert [lines[n] for n in (49, 0, 17)] == [{"n": n, "text": "é\n" * n} for n in (49, 0, 17)]
    assert [number for number, _ in objects(path)] == list(range(1, 51))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"n": 1', r"a\.jsonl line 3: not JSON \("),
        (b"[1]", r"a\.jsonl line 3: holds a list, but a JSON object is needed"),
        (b"", r"a\.jsonl line 3: the line is empty"),
        (b'{"n": "\xe4"}', r"a\.jsonl line 3: byte 8 is not UTF-8"),
        (b'{"n": 3}', r"a\.jsonl line 3: 'n' is odd"),
        (b"[" * 100_000, r"a\.jsonl line 3: not JSON"),
    ],
)
def test_a_bad_line_is_named_when_the_file_is_opened(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 2}\n{"n": 4}\n' + line + b'\n{"n": 6}\n')
    with pytest.raises(DataError, match=message):
        Lines(path, refuse_odd)


def test_a_huge_line_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"n": 2}\n')
        file.truncate(100 * 2**20)
    with pytest.raises(DataError, match=rf"a\.jsonl line 2: is longer than {jsonl.MAX_LINE_BYTES} bytes"):
        Lines(path, accept)


def test_an_empty_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read: No such file"):
        Lines(path, accept)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.jsonl is empty"):
        Lines(path, accept)
