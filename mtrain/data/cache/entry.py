"""One entry of the cache: the tokenised samples of a source, mapped into memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.core.batch.sample import TokenizedSample
from mtrain.data.cache.arrays import DTYPES, EXTRAS, OF_SAMPLES, ArrayWriter, checksum, fingerprint_of
from mtrain.data.formats.record_files import RecordFile

_FACTS = "entry.json"
FORMAT = 1
"""Version of the files of an entry, part of its key; raised when their meaning changes."""


class DamagedEntryError(Exception):
    """An entry cannot be used; it can be rebuilt."""


@dataclass(frozen=True)
class BadRecords:
    count: int
    first: tuple[tuple[int, int, str], ...]
    """(file, record in the file, fault) of the first few bad records."""


class TokenCache:
    """Samples of one source in the order of its records; thread-safe."""

    def __init__(self, folder: Path, files: tuple[RecordFile, ...], file_digests: tuple[str, ...]) -> None:
        """Maps the arrays and verifies all but the tokens, which are verified when they are read.

        Raises:
            DamagedEntryError: A file is missing or differs from what was written.
        """
        self.folder, self.files, self.file_digests = folder, files, file_digests
        facts = _read_facts(folder)
        self.num_records: int = facts["num_records"]
        """Bad records are counted too."""
        self.file_starts: tuple[int, ...] = tuple(facts["file_starts"])
        """Number of records before each file."""
        self.highest_id: int = facts["highest_id"]
        self.bad = BadRecords(facts["bad"]["count"], tuple((*each,) for each in facts["bad"]["first"]))
        arrays = {name: _mapped(folder, name, facts["arrays"][name]) for name in DTYPES}
        self._ids, self._run_lengths, self._run_weights = (arrays[name] for name in OF_SAMPLES)
        self._offsets, self._run_offsets = arrays["offsets"], arrays["run_offsets"]
        self._records, self._checksums = arrays["records"], arrays["checksums"]
        self.weights: NDArray[np.float64] = arrays["weights"]
        """[samples]: weight of each sample; negative for an unwanted answer."""
        fact = facts["arrays"].get(EXTRAS)
        extras = np.empty(0, np.float32) if fact is None else _mapped(folder, EXTRAS, fact)
        self.extras: NDArray[np.float32] = extras.reshape(self.num_tokens, -1)
        """[tokens, extras] of all samples laid end to end, mapped from disk."""
        self.fingerprint = fingerprint_of(facts["arrays"])
        """Fingerprint of the samples, whatever the form and path of their files."""

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def num_tokens(self) -> int:
        return int(self._offsets[-1])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Returns [samples]: tokens in each sample."""
        return np.diff(self._offsets)

    @cached_property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Returns [samples]: tokens of each sample before the first one in the loss."""
        first = self._run_offsets[:-1]
        return np.where(self._run_weights[first] > 0, 0, self._run_lengths[first]).astype(np.int64)

    def read(self, index: int) -> TokenizedSample:
        """Reads a sample; raises DataError where it differs from what was written."""
        start, end = self._offsets[index], self._offsets[index + 1]
        low, high = self._run_offsets[index], self._run_offsets[index + 1]
        ids, lengths, weights = self._ids[start:end], self._run_lengths[low:high], self._run_weights[low:high]
        extras = self.extras[start:end]
        if checksum(ids, lengths, weights, extras) != self._checksums[index]:
            raise DataError(
                f"{self.folder}: the tokens of sample {index} ({self.place(index)}) are not those that were written; "
                "remove this folder, it is made again at the next start, and check the disk"
            )
        weight = float(self.weights[index])
        return TokenizedSample(np.array(ids), np.repeat(weights, lengths), weight, np.array(extras))

    def record(self, index: int) -> int:
        """Returns the number of a sample's record in the source, counted from 0, bad records included."""
        return int(self._records[index])

    def place(self, index: int) -> str:
        """Names file and record of a sample, for messages."""
        record = self.record(index)
        file = int(np.searchsorted(self.file_starts, record, side="right")) - 1
        return self.files[file].place(record - self.file_starts[file] + 1)

    def bad_places(self) -> list[str]:
        """Describes the first few bad records."""
        return [f"{self.files[file].place(number)}: {why}" for file, number, why in self.bad.first]

    def trained_before(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Counts the tokens in the loss before each position of `ids`, all samples laid end to end."""
        ends, counted, is_trained = self._runs
        run = np.searchsorted(ends, positions, side="right")
        before = np.concatenate([[0], counted])[run]
        starts = np.concatenate([[0], ends])[run]
        inside = np.append(is_trained, False)[run]
        return before + np.where(inside, positions - starts, 0)

    @cached_property
    def is_counted(self) -> NDArray[np.bool_]:
        """Returns [tokens]: whether predicting each token counts; the first token of a sample is never predicted."""
        found: NDArray[np.bool_] = np.repeat(self._run_weights > 0, self._run_lengths)
        found[self._offsets[:-1]] = False
        return found

    @property
    def starts(self) -> NDArray[np.int64]:
        """Returns [samples + 1]: where each sample begins when all are laid end to end."""
        return self._offsets

    @cached_property
    def _runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Returns for each run: its end, the trained tokens up to there, and whether it is trained."""
        is_trained = self._run_weights > 0
        trained = np.cumsum(np.where(is_trained, self._run_lengths, 0), dtype=np.int64)
        return np.cumsum(self._run_lengths, dtype=np.int64), trained, is_trained


@dataclass(frozen=True)
class EntryFacts:
    """Facts that are known once the arrays are written."""

    file_starts: tuple[int, ...]
    num_records: int
    highest_id: int
    bad: BadRecords


def write_facts(folder: Path, writer: ArrayWriter, facts: EntryFacts) -> None:
    content = {
        "format": FORMAT,
        "arrays": writer.facts(),
        "file_starts": facts.file_starts,
        "num_records": facts.num_records,
        "highest_id": facts.highest_id,
        "bad": {"count": facts.bad.count, "first": facts.bad.first},
    }
    text = json.dumps(content, sort_keys=True)
    (folder / _FACTS).write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n")


def _read_facts(folder: Path) -> dict[str, Any]:
    try:
        digest, text, _ = (folder / _FACTS).read_text().split("\n")
    except (OSError, ValueError) as fault:
        raise DamagedEntryError(f"{_FACTS}: {fault}") from fault
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise DamagedEntryError(f"{_FACTS} is not what was written")
    facts: dict[str, Any] = json.loads(text)
    return facts


def _mapped(folder: Path, name: str, fact: dict[str, Any]) -> NDArray[Any]:
    path, dtype = folder / name, np.dtype(np.float32 if name == EXTRAS else DTYPES[name])
    try:
        size = path.stat().st_size
        if size != fact["bytes"]:
            raise DamagedEntryError(f"{name} has {size} bytes, not {fact['bytes']}")
        values = np.memmap(path, dtype, mode="r")
    except OSError as fault:
        raise DamagedEntryError(f"{name}: {fault.strerror or fault}") from fault
    if name not in (*OF_SAMPLES, EXTRAS) and hashlib.sha256(values.data).hexdigest() != fact["sha256"]:
        raise DamagedEntryError(f"{name} is not what was written")
    return values
