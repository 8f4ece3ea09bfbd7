"""Rows of parquet and Arrow as records; pyarrow reads them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, assert_never

from mtrain.base.errors import DataError, MachineError
from mtrain.base.plain_files import parsed_json
from mtrain.base.steady_files import TRANSIENT, steady
from mtrain.data.formats.recognise import FileKind

_JSON = "arrow.json"
"""Name of the type whose values are JSON as text, as Json() of Hugging Face's `datasets` writes it."""


def pyarrow(path: Path, kind: FileKind) -> ModuleType:
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
    """Yields the rows of a file in order, as record batches of at most `most_rows`."""
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
        case FileKind.LINES | FileKind.LIST | FileKind.GZIP | FileKind.ZSTD:
            raise AssertionError("a file of lines is not a table")
        case _:
            assert_never(kind)


def records_of(batch: Any) -> list[dict[str, Any]]:
    """Converts the rows of a record batch to JSON objects; nulls are kept for `mtrain.data.formats.record_files`."""
    rows: list[dict[str, Any]] = batch.to_pylist()
    decoders = {field.name: decoder for field in batch.schema if (decoder := _decoder(field)) is not None}
    for name, decode in decoders.items():
        for row in rows:
            row[name] = decode(row[name])
    return rows


Decoder = Callable[[Any], Any]


def _decoder(field: Any) -> Decoder | None:
    """Builds the function that turns a column's values into JSON objects; None if they already are."""
    kind = field.type
    # before version 19 pyarrow has no such type, and the name is in the field's metadata
    name = getattr(kind, "extension_name", None)
    if name == _JSON or (field.metadata or {}).get(b"ARROW:extension:name") == _JSON.encode():
        return partial(_decoded, field.name)
    inner = {child.name: _decoder(child) for child in map(kind.field, range(kind.num_fields))}
    decoders = {name: decoder for name, decoder in inner.items() if decoder is not None}
    # pyarrow's classes by name, since its module is imported only if a file needs it
    if type(kind).__name__ == "MapType":
        of_value = decoders.get(kind.item_field.name, lambda value: value)
        return _unless_none(lambda pairs: {key: of_value(value) for key, value in pairs})
    if not decoders:
        return None
    if type(kind).__name__ == "StructType":
        return _unless_none(lambda value: value | {key: decoders[key](value[key]) for key in value if key in decoders})
    (decoder,) = decoders.values()
    return _unless_none(lambda values: [decoder(value) for value in values])


def _unless_none(decoder: Decoder) -> Decoder:
    return lambda value: None if value is None else decoder(value)


def _decoded(column: str, text: str | None) -> Any:
    if text is None:
        return None
    try:
        value = parsed_json(text.encode())
    except ValueError as fault:
        if column == "content":
            return text
        raise DataError(
            f"column {column!r} has the type JSON, but holds {text!r:.40} ({fault}); write it again"
        ) from None
    # `datasets` stores a text verbatim if pandas' parser, which also accepts "1.", reads it as JSON;
    # and a content is always a text or a list of parts
    return value if column != "content" or isinstance(value, str | list) else text


@contextmanager
def _damage(path: Path, kind: FileKind, library: ModuleType) -> Iterator[None]:
    try:
        yield
    except (library.ArrowException, OSError, EOFError) as fault:
        if isinstance(fault, OSError) and fault.errno in TRANSIENT:  # an error of the disk, which was tried again
            raise DataError(f"{path} cannot be read: {fault.strerror}; look at the disk") from fault
        shown = " ".join(str(fault).split())[:200]
        raise DataError(f"{path} is damaged {kind.value} ({shown}); copy or write it again") from fault
