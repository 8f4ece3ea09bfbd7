"""Documents of text files, folders and JSONL, in a fixed order."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mtrain.base.errors import DataError
from mtrain.data.formats.jsonl import content, objects
from mtrain.data.formats.recognise import FileKind, kind_of_file

PACKED_SUFFIXES = (".gz", ".zst")


class TextFiles(NamedTuple):
    """Named files, and the matching files of named folders, sorted within each folder."""

    inputs: Sequence[Path]
    pattern: str = "**/*.txt"
    """Glob for files in a named folder."""
    text_key: str = "text"
    """Key of the text in JSON."""

    def files(self) -> list[Path]:
        files: list[Path] = []
        for path in self.inputs:
            if path.is_dir():
                matches = sorted(file for file in path.glob(self.pattern) if file.is_file())
                if not matches:
                    raise DataError(f"folder {path} has no file that matches {self.pattern!r}; change the pattern")
                files += matches
            elif path.is_file():
                files.append(path)
            else:
                raise DataError(f"input {path} does not exist; name a file or a folder")
        return files

    def documents(self) -> Iterator[str]:
        """Yields the text of each line of a .jsonl file and of every other file; .gz and .zst are unpacked."""
        return _documents(self.files(), self.text_key)


def _documents(files: Sequence[Path], text_key: str) -> Iterator[str]:
    for path in files:
        is_packed = path.suffix in PACKED_SUFFIXES
        kind = kind_of_file(path) if is_packed else FileKind.LINES
        if kind.is_arrow:
            raise DataError(f"{path} is {kind.value}, but text or JSON lines are needed; give those")
        if (Path(path.stem) if is_packed else path).suffix != ".jsonl":
            yield _text(path, kind)
            continue
        for number, record in objects(path, kind):
            where, text = f"{path} line {number}", record.get(text_key)
            if text_key not in record:
                names = ", ".join(record) or "none"
                raise DataError(f"{where}: has no {text_key!r}; its keys are {names}: name one with --text-key")
            if not isinstance(text, str):
                kind_of_text = type(text).__name__
                raise DataError(f"{where}: {text_key!r} is of type {kind_of_text}, but must be a string; fix the line")
            yield text


def _text(path: Path, kind: FileKind) -> str:
    try:
        return content(path, kind).decode("utf-8")
    except UnicodeDecodeError as fault:
        raise DataError(f"{path}: byte {fault.start + 1} is not UTF-8; save the file in that encoding") from None
