"""Rows of parquet and Arrow as records; pyarrow reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, assert_never

from mtrain.base.errors import DataError, MachineError
from mtrain.base.steady_files import TRANSIENT, steady
from mtrain.data.formats.recognise import FileKind

_NULL_SAYS_SOMETHING = frozenset({"content"})
"""Keys that stay where they are null: an answer that is only a call of tools has such a content."""


def pyarrow(path: Path, kind: FileKind) -> ModuleType:
    """The library.

    Raises:
        MachineError: It is not installed.
    """
    try:
        import pyarrow
    except ImportError as fault:
        raise MachineError(
            f"{path} is {kind.value}, which pyarrow reads, but pyarrow is not installed; install mtrain[data], or "
            "write the data as JSON lines"
        ) from fault
    library: ModuleType = pyarrow
    return library


def tables(path: Path, kind: FileKind, most_rows: int) -> Iterator[Any]:
    """Yields the rows of a file in their order, as record batches of at most `most_rows`.

    Raises:
        DataError: The file is damaged.
        MachineError: pyarrow is not installed.
    """
    library = pyarrow(path, kind)
    with _damage(path, kind, library):
        for batch in _batches(library, path, kind, most_rows):
            for start in range(0, batch.num_rows, most_rows):
                yield batch.slice(start, most_rows)


def _batches(library: ModuleType, path: Path, kind: FileKind, most_rows: int) -> Iterator[Any]:
    match kind:
        case FileKind.PARQUET:
            from pyarrow.parquet import ParquetFile

            with steady(path) as raw, ParquetFile(raw) as file:
                yield from file.iter_batches(batch_size=most_rows)
        case FileKind.ARROW_FILE:
            with steady(path) as raw, library.ipc.open_file(raw) as reader:
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)
        case FileKind.ARROW_STREAM:
            with steady(path) as raw, library.ipc.open_stream(raw) as reader:
                yield from reader
        case FileKind.LINES | FileKind.GZIP | FileKind.ZSTD:
            raise AssertionError("lines are no rows")
        case _:
            assert_never(kind)


def records_of(batch: Any) -> list[dict[str, Any]]:
    """The rows of a record batch. A table has no absent keys, so a null stands for one; see _NULL_SAYS_SOMETHING."""
    return [_without_nulls(row) for row in batch.to_pylist()]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_nulls(inner)
            for key, inner in value.items()
            if inner is not None or key in _NULL_SAYS_SOMETHING
        }
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


@contextmanager
def _damage(path: Path, kind: FileKind, library: ModuleType) -> Iterator[None]:
    try:
        yield
    except (library.ArrowException, OSError, EOFError) as fault:
        if isinstance(fault, OSError) and fault.errno in TRANSIENT:  # of the disk, which was tried again
            raise DataError(f"{path} cannot be read: {fault.strerror}; look at the disk") from fault
        shown = " ".join(str(fault).split())[:200]
        raise DataError(f"{path} is damaged {kind.value} ({shown}); copy or write it again") from fault
