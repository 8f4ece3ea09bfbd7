"""Files of a source: one file, a pattern, a folder, or a dataset that Hugging Face's `datasets` saved to disk."""

from __future__ import annotations

import glob
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.base.errors import DataError
from mtrain.base.plain_files import parsed_json, read_plain_file
from mtrain.data.formats.recognise import FileKind, kind_of_file

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")
"""Endings of the files that are read of a folder; the form of a file follows from its first bytes."""
_HF_STATE, _HF_SPLITS = "state.json", "dataset_dict.json"
_MOST_BYTES = 1 << 24
"""Largest size of either of the two files."""


@dataclass(frozen=True)
class RecordFile:
    """A file of records."""

    path: Path
    kind: FileKind

    def place(self, number: int) -> str:
        """Returns the place of a record for messages; `number` is counted from 1."""
        unit = "row" if self.kind.is_arrow else "record" if self.kind is FileKind.LIST else "line"
        return f"{self.path} {unit} {number}"


def record_files(given: str) -> list[RecordFile]:
    """Lists the files that a source names, in the order in which their records are counted.

    Args:
        given: Path of a file; a pattern with `*`, `**`, `?` or `[`; or a folder, of which every file with one of the
            endings .jsonl, .jsonl.gz, .jsonl.zst, .parquet and .arrow is read, at any depth. Files of a pattern or a
            folder are sorted by their path.

    Raises:
        DataError: Nothing is there, or a file that holds no records.
    """
    path = Path(given)
    if path.is_dir():
        return _of_folder(path)
    if path.exists() or not glob.has_magic(given):  # a file may have brackets in its name
        return [RecordFile(path, kind_of_file(path))]
    found = sorted(each for each in map(Path, glob.glob(given, recursive=True)) if each.is_file())
    if not found:
        raise DataError(f"no file matches {given}; change the pattern")
    return [RecordFile(each, kind_of_file(each)) for each in found]


def _of_folder(folder: Path) -> list[RecordFile]:
    if (folder / _HF_SPLITS).is_file():
        splits = _json(folder / _HF_SPLITS).get("splits")
        names = ", ".join(map(str, splits)) if isinstance(splits, list) else "no splits"
        raise DataError(f"{folder} is a Hugging Face dataset of several splits ({names}); name one, as {folder}/train")
    if (folder / _HF_STATE).is_file():
        return _of_dataset(folder)
    found = sorted(
        each
        for each in folder.rglob("*")
        if each.name.endswith(_SUFFIXES) and each.is_file() and not _is_hidden(each.relative_to(folder))
    )
    if not found:
        raise DataError(
            f"folder {folder} has no file that ends with {', '.join(_SUFFIXES)}; name the files by a pattern"
        )
    files = [RecordFile(each, kind_of_file(each)) for each in found]
    kinds = Counter(file.kind.value for file in files)
    if len(kinds) > 1:
        # often the same records in two forms, which would be trained twice
        shown = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
        raise DataError(f"folder {folder} holds files of several kinds ({shown}); name those of one by a pattern")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _of_dataset(folder: Path) -> list[RecordFile]:
    """Lists the files of a dataset that was saved to disk. Source: datasets 5.2, arrow_dataset.py,
    Dataset.save_to_disk."""
    state = _json(folder / _HF_STATE)
    if state.get("_indices_data_files"):
        raise DataError(f"{folder} was saved by an old version of datasets with a choice of rows; save it again")
    try:
        paths = [folder / file["filename"] for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise DataError(f"{folder / _HF_STATE} does not name its files; save the dataset again") from None
    if not paths:
        raise DataError(f"{folder} is a dataset without files; save one that holds samples")
    return [RecordFile(path, kind_of_file(path)) for path in paths]


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
