"""Records of a source, one after the other, in chunks that can be read separately, whatever the form of its files.

A null in a record counts as a key that is absent. In a table every object of a column has the same keys, and those that
an object lacks are null in it; a JSON file that was written from such a table has these nulls, too. Nobody can tell
them from nulls that the author wrote. So a key whose value is null is left out at any depth, also in tools and in
arguments of their calls. Two nulls are kept: the content of a message, as an answer that is only a call has one, and
elements of lists, which no table fills in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mtrain.data.formats.jsonl import parsed_line, raw_lines
from mtrain.data.formats.record_files import RecordFile
from mtrain.data.formats.rows import records_of, tables

_CONVERSATIONS = frozenset({"messages", "prompt", "chosen", "rejected", "completion"})
"""Keys of records under which messages may stand."""


def without_nulls(value: Any) -> Any:
    """Removes keys that are null from a value, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def record_without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """Removes keys that are null from a record; messages keep a content that is null."""
    return {
        key: [_message(each) for each in value]
        if key in _CONVERSATIONS and isinstance(value, list)
        else without_nulls(value)
        for key, value in record.items()
        if value is not None
    }


def _message(given: Any) -> Any:
    found = without_nulls(given)
    if isinstance(given, dict) and "content" in given and given["content"] is None:
        # in its place, as a template may write keys in their order
        return {key: found.get(key) for key in given if key in found or key == "content"}
    return found


_CHUNK_BYTES = 1 << 18
_CHUNK_RECORDS = 256
"""Number of records that is small enough to share the work of a short file, and large enough that handing a chunk over
costs next to nothing."""


@dataclass(frozen=True)
class Chunk(ABC):
    """Consecutive records of one file, not parsed yet."""

    file: int
    """Number of the file in the source, counted from 0."""
    first: int
    """Number of the first record in its file, counted from 1."""

    @abstractmethod
    def __len__(self) -> int:
        """Counts the records."""

    @abstractmethod
    def record(self, index: int) -> dict[str, Any]:
        """Parses the record of this index, counted from 0.

        Raises:
            DataError: The line or row is no record; says what is wrong, not where it lies.
        """


@dataclass(frozen=True)
class LineChunk(Chunk):
    """Lines of JSON."""

    lines: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.lines)

    def record(self, index: int) -> dict[str, Any]:
        line = self.lines[index]
        found = parsed_line(line)
        return record_without_nulls(found) if b"null" in line else found


@dataclass(frozen=True)
class RowChunk(Chunk):
    """Rows of a table."""

    batch: Any
    """Record batch of pyarrow."""

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def record(self, index: int) -> dict[str, Any]:
        return record_without_nulls(self._records[index])

    @cached_property
    def _records(self) -> list[dict[str, Any]]:
        return records_of(self.batch)


def chunks(files: Sequence[RecordFile]) -> Iterator[Chunk]:
    """Yields all records; where a chunk ends depends on the files alone.

    Raises:
        DataError: A file is damaged.
        MachineError: pyarrow, which reads one of them, is not installed.
    """
    for number, file in enumerate(files):
        yield from _rows(number, file) if file.kind.is_arrow else _lines(number, file)


def _rows(number: int, file: RecordFile) -> Iterator[Chunk]:
    first = 1
    for batch in tables(file.path, file.kind, _CHUNK_RECORDS):
        yield RowChunk(number, first, batch)
        first += batch.num_rows


def _lines(number: int, file: RecordFile) -> Iterator[Chunk]:
    lines: list[bytes] = []
    first, size = 1, 0
    for line in raw_lines(file.path, file.kind):
        lines.append(line)
        size += len(line)
        if size >= _CHUNK_BYTES or len(lines) == _CHUNK_RECORDS:
            yield LineChunk(number, first, tuple(lines))
            first, size, lines = first + len(lines), 0, []
    if lines:
        yield LineChunk(number, first, tuple(lines))
