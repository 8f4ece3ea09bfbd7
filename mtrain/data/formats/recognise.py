"""Recognises a file by its first bytes, not by its name; explains what an unreadable file is and what to do."""

import enum
from codecs import BOM_UTF8
from pathlib import Path

from mtrain.base.errors import DataError
from mtrain.base.plain_files import open_plain_file
from mtrain.base.steady_files import retried


class FileKind(enum.Enum):
    LINES = "JSON lines"
    LIST = "a JSON list"
    GZIP = "gzip"
    ZSTD = "zstd"
    PARQUET = "parquet"
    ARROW_FILE = "Arrow file"
    ARROW_STREAM = "Arrow stream"

    @property
    def is_arrow(self) -> bool:
        """Says whether records are rows of a table, which pyarrow reads."""
        return self in (FileKind.PARQUET, FileKind.ARROW_FILE, FileKind.ARROW_STREAM)


_HEAD_BYTES = 4096

_KINDS = (
    (b"PAR1", FileKind.PARQUET),
    (b"ARROW1", FileKind.ARROW_FILE),
    (b"\xff\xff\xff\xff", FileKind.ARROW_STREAM),  # of a Hugging Face dataset that was saved to disk
    (b"\x1f\x8b", FileKind.GZIP),
    (b"\x28\xb5\x2f\xfd", FileKind.ZSTD),
)

_AS_LINES = "write one JSON object per line"
_UNPACK = "unpack it, or compress it with gzip or zstd"
_REFUSED = (
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself", "fetch it with git lfs pull"),
    (b"\x80\x02", "a pickle, which could run code", _AS_LINES),
    (b"\x80\x03", "a pickle, which could run code", _AS_LINES),
    (b"\x80\x04", "a pickle, which could run code", _AS_LINES),
    (b"\x80\x05", "a pickle, which could run code", _AS_LINES),
    (b"PK\x03\x04", "a zip archive (or a file of torch, numpy or a spreadsheet)", f"{_AS_LINES}, or unpack it"),
    (b"\x93NUMPY", "an array of numpy", _AS_LINES),
    (b"\x89HDF", "an HDF5 file", _AS_LINES),
    (b"SQLite format 3", "a SQLite database", _AS_LINES),
    (b"ORC", "an ORC table", "write it as parquet"),
    (b"Obj\x01", "an Avro file", "write it as parquet"),
    (b"PARE", "an encrypted parquet file", "write it without encryption"),
    (b"BZh", "compressed by bzip2", _UNPACK),
    (b"\xfd7zXZ", "compressed by xz", _UNPACK),
    (b"\x04\x22\x4d\x18", "compressed by lz4", _UNPACK),
    (b"\x7fELF", "a program", _AS_LINES),
    (b"%PDF", "a PDF", _AS_LINES),
    (b"\x89PNG", "a picture", _AS_LINES),
    (b"\xff\xd8\xff", "a picture", _AS_LINES),
    (b"\xff\xfe", "text in UTF-16", "save it as UTF-8"),
    (b"\xfe\xff", "text in UTF-16", "save it as UTF-8"),
    (b"[", "one JSON list, packed", "unpack it, or write one JSON object per line"),
)
_TAR_MAGIC, _TAR_OFFSET = b"ustar", 257
_PAGES = (b"<!doctype", b"<html", b"<?xml")


class EmptyFileError(DataError):
    """A file is intact, but has no records."""


def kind_of_file(path: Path) -> FileKind:
    """Recognises the form of a file by its first bytes."""
    try:
        head = retried(lambda: _head(path), path)
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}; check the path") from fault
    kind = next((kind for magic, kind in _KINDS if head.startswith(magic)), None)
    if kind is None and head.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
        kind = FileKind.LIST
    if kind is None:
        check_text(head, path)
        kind = FileKind.LINES
    return kind


def _head(path: Path) -> bytes:
    with open_plain_file(path) as file:
        return file.read(_HEAD_BYTES)


def check_text(head: bytes, path: Path) -> None:
    """Refuses the first bytes of a file if they are not JSON lines; says what they are and what to do."""
    if not head:
        raise EmptyFileError(f"{path} is empty, but at least one line is needed; give a file that holds samples")
    if fault := _unreadable(head):
        what, change = fault
        raise DataError(f"{path} is {what}, but JSON lines, parquet or Arrow are needed; {change}")


def _unreadable(head: bytes) -> tuple[str, str] | None:
    """Returns what the bytes are, and what to do; None for text."""
    known = next(((what, change) for magic, what, change in _REFUSED if head.startswith(magic)), None)
    if known is not None:
        return known
    if head.lstrip().lower().startswith(_PAGES):
        return "a web page (a failed download is often one)", "download the file again"
    if head[_TAR_OFFSET:].startswith(_TAR_MAGIC):
        return "a tar archive", _UNPACK
    if any(head.startswith(magic) for magic, _ in _KINDS):
        return "packed twice", _UNPACK
    # JSON never contains NUL, not even as padding
    return ("binary", _AS_LINES) if b"\0" in head else None
