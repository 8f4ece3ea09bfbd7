"""Records of a source, one after the other, in chunks that can be read separately, whatever the form of its files.

A null in a record counts as an absent key. In a table all objects of a column have the same keys, and null stands for
those that an object lacks; JSON written from such a table has these nulls as well, and nobody can tell them from nulls
that the author wrote. So null keys are dropped at any depth, also in tools and arguments of calls. Two nulls stay: the
content of a message, since an answer that is only a call has one, and elements of lists, which no table fills in.
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
"""Keys of records that may hold messages."""


def without_nulls(value: Any) -> Any:
    """Drops null keys of a value at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def record_without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """Drops null keys of a record; messages keep a null content."""
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
"""Small enough to share the work of a short file, large enough that handing a chunk over costs next to nothing."""


@dataclass(frozen=True)
class Chunk(ABC):
    """Consecutive records of one file, not yet parsed."""

    file: int
    """Number of the file in the source, counted from 0."""
    first: int
    """Number of the first record in its file, counted from 1."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def record(self, index: int) -> dict[str, Any]:
        """Parses the record of this index, counted from 0; errors do not say where it is."""


@dataclass(frozen=True)
class LineChunk(Chunk):
    lines: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.lines)

    def record(self, index: int) -> dict[str, Any]:
        line = self.lines[index]
        found = parsed_line(line)
        return record_without_nulls(found) if b"null" in line else found


@dataclass(frozen=True)
class RowChunk(Chunk):
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
    """Yields all records; chunk boundaries depend on the files alone."""
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
