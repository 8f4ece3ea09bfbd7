"""JSON lines on disk, plain or packed."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, assert_never, cast

from mtrain.base.errors import DataError
from mtrain.base.plain_files import parsed_json
from mtrain.base.steady_files import steady
from mtrain.data.formats.recognise import EmptyFileError, FileKind, check_text
from mtrain.data.formats.rows import pyarrow

MAX_LINE_BYTES = 16 * 2**20
"""Longest allowed line, in bytes: a longer one is nearly always a file of another kind, and would fill the memory."""
_LARGEST_LIST_BYTES = 2 * 2**30
"""Largest file that is one JSON list; unlike lines, it is read as a whole."""
_BLANKS = re.compile(r"[ \t\n\r]*")


def objects(path: Path, kind: FileKind = FileKind.LINES) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object); errors name file and line. Tables are not allowed here."""
    for number, line in enumerate(raw_lines(path, kind), start=1):
        try:
            record = parsed_line(line)
        except DataError as fault:
            raise DataError(f"{path} line {number}: {fault}") from None
        yield number, record


def parsed_line(line: bytes) -> dict[str, Any]:
    """Parses one line of UTF-8 and standard JSON as an object; errors do not say where it is."""
    if not line.strip():
        raise DataError("the line is empty, but a JSON object is needed; remove it")
    try:
        value = parsed_json(line)
    except UnicodeDecodeError as fault:
        raise DataError(f"byte {fault.start + 1} is not UTF-8; save the file in that encoding") from None
    except UnicodeEncodeError:
        raise DataError("contains half a surrogate pair, which is not text; fix the escape sequence") from None
    except ValueError as fault:
        raise DataError(f"not JSON ({fault}); write one JSON object per line") from None
    if not isinstance(value, dict):
        raise DataError(f"holds a value of type {type(value).__name__}, but a JSON object is needed; fix it")
    return value


def raw_lines(path: Path, kind: FileKind = FileKind.LINES) -> Iterator[bytes]:
    """Yields the unpacked lines of a file, without empty ones at its end, or the elements of a list. Tables are not
    allowed here."""
    if kind is FileKind.LIST:
        yield from _elements(path)
        return
    with _reading(path, kind) as file:
        # a stream cannot be read twice, so the unpacked text is checked as it is read
        first = file.readline(MAX_LINE_BYTES + 1)
        if kind is not FileKind.LINES:
            check_text(first, path)
        yield from _lines(file, first, path)


def content(path: Path, kind: FileKind) -> bytes:
    """Reads a whole file, unpacked. Tables are not allowed here."""
    with _reading(path, kind) as file:
        return file.read()


@contextmanager
def _reading(path: Path, kind: FileKind) -> Iterator[BinaryIO]:
    """Opens a file, unpacked; turns any fault of reading into a DataError."""
    try:
        with _opened(path, kind) as file:
            yield file
    except (EOFError, zlib.error) as fault:
        raise _damaged(path, kind, fault) from fault
    except OSError as fault:
        if kind is not FileKind.LINES and fault.errno is None:  # an error of the compressed data, not of the disk
            raise _damaged(path, kind, fault) from fault
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}; check the path") from fault


def _elements(path: Path) -> Iterator[bytes]:
    """Yields the JSON text of each element of a file that is one list."""
    with _reading(path, FileKind.LIST) as file:
        raw = file.read(_LARGEST_LIST_BYTES + 1)
    if len(raw) > _LARGEST_LIST_BYTES:
        raise DataError(
            f"{path} is a JSON list of more than {_LARGEST_LIST_BYTES} bytes, which is read as a whole; write one JSON "
            "object per line"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise DataError(f"{path}: byte {fault.start + 1} is not UTF-8; save the file in that encoding") from None
    decoder, number = json.JSONDecoder(), 1
    position = _after_blanks(text, _after_blanks(text, 0) + 1)
    if text[position : position + 1] == "]":
        raise EmptyFileError(f"{path} is an empty JSON list; give a file that holds samples")
    while True:
        try:
            end = decoder.raw_decode(text, position)[1]
        except (ValueError, RecursionError) as fault:
            raise DataError(f"{path} record {number}: not JSON ({fault}); fix the list") from None
        yield _short_enough(text[position:end].encode(errors="surrogatepass"), f"{path} record {number}")
        position = _after_blanks(text, end)
        if text[position : position + 1] != ",":
            break
        position, number = _after_blanks(text, position + 1), number + 1
    if text[position : position + 1] != "]" or text[position + 1 :].strip():
        raise DataError(
            f"{path}: {text[position : position + 20]!r} follows record {number}, but a comma, or the end of the list "
            "and of the file, is needed; fix the list, or write one JSON object per line"
        )


def _short_enough(record: bytes, location: str) -> bytes:
    if len(record) > MAX_LINE_BYTES:
        raise DataError(
            f"{location}: is longer than {MAX_LINE_BYTES} bytes; write one JSON object per line, and cut long texts "
            "into several"
        )
    return record


def _after_blanks(text: str, position: int) -> int:
    match = _BLANKS.match(text, position)
    assert match is not None, "the pattern also matches the empty text"
    return match.end()


def _lines(file: BinaryIO, line: bytes, path: Path) -> Iterator[bytes]:
    number = 1
    empty: list[bytes] = []
    while line:
        # one byte more than allowed, to see that a line is longer without reading all of it
        _short_enough(line, f"{path} line {number}")
        # empty lines count if others follow, which keeps line numbers; many editors leave some at the end
        if line.strip() or number == 1:
            yield from empty
            yield line
            empty = []
        else:
            empty.append(line)
        line = file.readline(MAX_LINE_BYTES + 1)
        number += 1


def _opened(path: Path, kind: FileKind) -> BinaryIO:
    match kind:
        case FileKind.LINES | FileKind.LIST:
            return steady(path)
        case FileKind.GZIP:
            return cast(BinaryIO, _Unpacked(path))
        case FileKind.ZSTD:
            library = pyarrow(path, kind)
            # not the package zstandard, which reads a truncated file without an error
            return io.BufferedReader(library.CompressedInputStream(library.PythonFile(steady(path), "r"), "zstd"))
        case FileKind.PARQUET | FileKind.ARROW_FILE | FileKind.ARROW_STREAM:
            raise AssertionError("tables have no lines")
        case _:
            assert_never(kind)


class _Unpacked(gzip.GzipFile):
    """Unpacked view of a gzip file; closing it closes the file as well."""

    def __init__(self, path: Path) -> None:
        self._packed = steady(path)
        super().__init__(fileobj=self._packed, mode="rb")

    def close(self) -> None:
        super().close()
        self._packed.close()


def _damaged(path: Path, kind: FileKind, fault: Exception) -> DataError:
    shown = " ".join(str(fault).split())[:200]
    return DataError(f"{path} is damaged {kind.value} ({shown}); copy or pack it again")
