"""Files of a source, and their records: one file, a pattern, a folder, or a dataset of Hugging Face's `datasets`.

Records come in order, in chunks that can be read separately, whatever the form of the files. A null in a record counts
as an absent key. In a table all objects of a column have the same keys, with null for those that an object lacks; JSON
written from such a table has these nulls as well, and nobody can tell them from nulls that the author wrote. So null
keys are dropped at any depth, also in tools and in arguments of calls. Two nulls stay: the content of a message, since
an answer that is only a call has a null content, and elements of lists, which no table fills in.
"""

import glob
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.base.errors import DataError
from mtrain.base.plain_files import parsed_json, read_plain_file
from mtrain.base.spelling import counted
from mtrain.data.formats.jsonl import parsed_line, raw_lines
from mtrain.data.formats.recognise import EmptyFileError, FileKind, kind_of_file
from mtrain.data.formats.rows import records_of, tables
from mtrain.hf.hub import how_to_download, revision_of

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")
"""Endings of the files that are read in a folder; the form of a file follows from its first bytes."""
_HF_STATE, _HF_SPLITS = "state.json", "dataset_dict.json"
_SPLIT = re.compile(r"(train|test|valid|validation|dev|eval)(?=[-_.])")
"""Beginning of the names of a dataset's files on the hub."""
_MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class RecordFile:
    path: Path
    kind: FileKind

    def place(self, number: int) -> str:
        """Returns the location of a record for messages; `number` is counted from 1."""
        if self.kind.is_arrow:
            return f"{self.path} row {number}"
        return f"{self.path} {'record' if self.kind is FileKind.LIST else 'line'} {number}"


_MOST_SHOWN = 3
"""Most files that a note names."""


class Source(NamedTuple):
    files: list[RecordFile]
    """Files with records, in counting order."""
    empty: list[Path]
    """Files of a pattern or folder without records, which sharding programs may leave."""


def record_files(source: str) -> list[RecordFile]:
    """Lists the files of a source that hold records; see `source_files`."""
    return source_files(source).files


def source_files(source: str) -> Source:
    """Lists the files that a source names: the path of a file; a pattern with `*`, `**`, `?` or `[`; or a folder, whose
    files with the endings .jsonl, .jsonl.gz, .jsonl.zst, .parquet and .arrow are read at any depth. Files of a pattern
    or folder are sorted by path."""
    path = Path(source)
    if path.is_dir():
        return _source_of_folder(path)
    if not path.exists() and (hint := how_to_download(source, "dataset")):
        raise DataError(f"{source} does not exist; name a file, a folder or a pattern{hint}")
    if path.exists() or not glob.has_magic(source):  # a file may have brackets in its name
        return Source([RecordFile(path, kind_of_file(path))], [])
    files = sorted(file for file in map(Path, glob.glob(source, recursive=True)) if file.is_file())
    if not files:
        raise DataError(f"no file matches {source}; change the pattern")
    return _source_of_paths(files, source)


def left_out(empty: list[Path]) -> str:
    more = f" and {len(empty) - _MOST_SHOWN} more" if len(empty) > _MOST_SHOWN else ""
    return f"{len(empty)} file(s) hold no records and are left out: {', '.join(map(str, empty[:_MOST_SHOWN]))}{more}"


def _source_of_paths(paths: list[Path], source: str | Path) -> Source:
    by_path = {path: _with_records(path) for path in paths}
    files = [file for file in by_path.values() if file is not None]
    if not files:
        raise DataError(
            f"{source}: none of its {counted(len(paths), 'file')} holds a record; give files that hold samples"
        )
    return Source(files, [path for path, file in by_path.items() if file is None])


def _with_records(path: Path) -> RecordFile | None:
    """Returns the file; None if it is intact but has no records."""
    try:
        file = RecordFile(path, kind_of_file(path))
    except EmptyFileError:
        return None
    try:
        if file.kind.is_arrow:
            is_empty = next(tables(path, file.kind, 1), None) is None
        else:
            # `raw_lines` yields a blank first line even if no other line follows
            is_empty = not b"".join(islice(raw_lines(path, file.kind), 2)).strip()
    except EmptyFileError:
        is_empty = True
    except DataError:
        is_empty = False  # damaged; its reader reports that with file and record
    return None if is_empty else file


def _source_of_folder(folder: Path) -> Source:
    if (folder / _HF_SPLITS).is_file():
        splits = _json(folder / _HF_SPLITS).get("splits")
        names = ", ".join(map(str, splits)) if isinstance(splits, list) else "no splits"
        raise DataError(f"{folder} is a Hugging Face dataset of several splits ({names}); name one, as {folder}/train")
    if (folder / _HF_STATE).is_file():
        return _source_of_dataset(folder)
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.name.endswith(_SUFFIXES) and path.is_file()
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not paths:
        raise DataError(
            f"folder {folder} has no file that ends with {', '.join(_SUFFIXES)}; name the files by a pattern"
        )
    splits = sorted({match[0] for path in paths if (match := _SPLIT.match(path.name))})
    if len(splits) > 1 and revision_of(str(folder)) is not None:
        raise DataError(
            f"{folder} is a dataset of the hub with several splits ({', '.join(splits)}); select the files of one by "
            f"a pattern such as org/name/data/{splits[-1]}-*"
        )
    source = _source_of_paths(paths, folder)
    kinds = Counter(file.kind.value for file in source.files)
    if len(kinds) > 1:
        # often the same records in two forms, which would be trained twice
        shown = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
        raise DataError(f"folder {folder} holds files of several kinds ({shown}); name those of one by a pattern")
    return source


def _source_of_dataset(folder: Path) -> Source:
    """Lists the files of a dataset saved to disk. Source: datasets 5.2, arrow_dataset.py, Dataset.save_to_disk."""
    state = _json(folder / _HF_STATE)
    if state.get("_indices_data_files"):
        raise DataError(f"{folder} was saved by an old version of datasets with a choice of rows; save it again")
    try:
        paths = [folder / file["filename"] for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise DataError(f"{folder / _HF_STATE} does not name its files; save the dataset again") from None
    if not paths:
        raise DataError(f"{folder} is a dataset without files; save one that holds samples")
    return _source_of_paths(paths, folder)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = parsed_json(read_plain_file(path, _MOST_BYTES))
    except (OSError, ValueError) as fault:
        raise DataError(f"{path} is not JSON ({fault}); save the dataset again") from fault
    if not isinstance(content, dict):
        raise DataError(
            f"{path} holds a value of type {type(content).__name__}, but a JSON object is needed; save the "
            "dataset again"
        )
    return content


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
        key: [_message(message) for message in value]
        if key in _CONVERSATIONS and isinstance(value, list)
        else without_nulls(value)
        for key, value in record.items()
        if value is not None
    }


def _message(message: Any) -> Any:
    cleaned = without_nulls(message)
    if isinstance(message, dict) and "content" in message and message["content"] is None:
        # in its position, since a template may write keys in their order
        return {key: cleaned.get(key) for key in message if key in cleaned or key == "content"}
    return cleaned


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
        record = parsed_line(line)
        return record_without_nulls(record) if b"null" in line else record


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
