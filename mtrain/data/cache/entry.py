"""One entry of the cache: the tokenised samples of a source, plain arrays that are mapped into memory.

The weights of tokens are kept as runs of equal weights: a conversation has few runs, and a sample with a weight for
every token loses nothing. Runs are as long as possible, so the same samples give the same bytes.
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.core.batch.sample import TokenizedSample
from mtrain.data.cache.images import (
    IMAGE_BYTES,
    IMAGE_DTYPES,
    IMAGES_OF_TRAINING,
    ChunkImage,
    ImageStore,
    ImageWriter,
    chunk_images,
)
from mtrain.data.formats.record_files import RecordFile

DTYPES: dict[str, type[np.generic]] = {
    "ids": np.int32,
    "run_lengths": np.int32,
    "run_weights": np.float32,
    "offsets": np.int64,
    "run_offsets": np.int64,
    "weights": np.float64,
    "records": np.int64,
    "checksums": np.uint32,
}
"""Element type of each array. [samples + 1]: offsets, run_offsets. [samples]: weights; records, the number of each
sample's record in its source, counted from 0; checksums, CRC-32 of ids and runs, so that reading one sample notices a
flipped bit."""

EXTRAS = "extras"
"""Name of an array that only samples with extras have: float32, [tokens, extras]."""
_ALL_DTYPES = DTYPES | {EXTRAS: np.float32} | IMAGE_DTYPES
OF_SAMPLES = ("ids", "run_lengths", "run_weights")
LARGE = (*OF_SAMPLES, EXTRAS, IMAGE_BYTES)
"""Arrays that are verified sample by sample when they are read; the others are verified when the entry is opened."""

_OF_TRAINING = ("ids", "offsets", "run_lengths", "run_weights", "run_offsets", "weights", EXTRAS, *IMAGES_OF_TRAINING)
"""Arrays that training reads; the fingerprint of the data covers them."""


class Runs(NamedTuple):
    """Runs of equal weights, as long as possible; no run crosses the end of a sample."""

    lengths: NDArray[np.int32]
    weights: NDArray[np.float32]
    counts: NDArray[np.int32]


def runs_of(loss_weights: NDArray[np.float32], lengths: NDArray[np.int32]) -> Runs:
    """Finds the runs of equal weights of several samples laid end to end; `lengths` are at least 1."""
    if len(lengths) == 0:
        return Runs(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    is_edge = np.empty(len(loss_weights), np.bool_)
    is_edge[1:] = loss_weights[1:] != loss_weights[:-1]
    is_edge[starts] = True
    edges = np.flatnonzero(is_edge)
    run_lengths = np.diff(edges, append=len(loss_weights)).astype(np.int32)
    return Runs(run_lengths, loss_weights[edges], np.add.reduceat(is_edge, starts, dtype=np.int32))


class EncodedChunk(NamedTuple):
    """Samples of consecutive records, as a worker returns them."""

    file: int
    first: int
    """Number of the first record in its file, counted from 1."""
    num_records: int
    """Includes bad records."""
    ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    runs: Runs
    weights: NDArray[np.float64]
    numbers: NDArray[np.int64]
    """Number of each sample's record in its file, counted from 1."""
    extras: NDArray[np.float32]
    """[tokens, extras]; empty unless data.extras names some."""
    bad: tuple[tuple[int, str], ...]
    """Number and fault of each bad record."""
    images: tuple[ChunkImage, ...] = ()


def checksum(
    ids: NDArray[np.int32],
    run_lengths: NDArray[np.int32],
    run_weights: NDArray[np.float32],
    extras: NDArray[np.float32],
) -> int:
    crc = zlib.crc32(ids.data)
    crc = zlib.crc32(run_lengths.data, crc)
    crc = zlib.crc32(run_weights.data, crc)
    return zlib.crc32(extras.tobytes(), crc)


def encoded(
    file: int,
    first: int,
    num_records: int,
    samples: Sequence[tuple[int, TokenizedSample]],
    bad: Sequence[tuple[int, str]],
) -> EncodedChunk:
    lengths = np.array([len(sample.ids) for _, sample in samples], np.int32)
    return EncodedChunk(
        file,
        first,
        num_records,
        ids=_joined([sample.ids for _, sample in samples], np.int32),
        lengths=lengths,
        runs=runs_of(_joined([sample.loss_weights for _, sample in samples], np.float32), lengths),
        weights=np.array([sample.weight for _, sample in samples], np.float64),
        numbers=np.array([number for number, _ in samples], np.int64),
        extras=_joined([sample.extras for _, sample in samples if sample.extras is not None], np.float32),
        bad=tuple(bad),
        images=chunk_images([sample for _, sample in samples]),
    )


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


class ArrayWriter:
    """Writes the arrays of a new entry, one after the other; use it in a `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._digests: dict[str, hashlib._Hash] = {}
        self._sizes: dict[str, int] = {}
        self.num_tokens = self.num_runs = self.num_samples = 0
        self._images = ImageWriter(self._write)

    def __enter__(self) -> Self:
        for name in DTYPES:
            self._write(name, np.zeros(1 if name in ("offsets", "run_offsets") else 0))
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, chunk: EncodedChunk, first_of_file: int) -> None:
        """Appends the samples of a chunk; `first_of_file` is the number of records in earlier files."""
        ends = np.cumsum(chunk.lengths, dtype=np.int64)
        runs, run_ends = chunk.runs, np.cumsum(chunk.runs.counts, dtype=np.int64)
        checksums = [
            checksum(chunk.ids[start:end], runs.lengths[low:high], runs.weights[low:high], chunk.extras[start:end])
            for start, end, low, high in zip(ends - chunk.lengths, ends, run_ends - runs.counts, run_ends)
        ]
        self._write("ids", chunk.ids)
        self._write("run_lengths", runs.lengths)
        self._write("run_weights", runs.weights)
        self._write("offsets", ends + self.num_tokens)
        self._write("run_offsets", run_ends + self.num_runs)
        self._write("weights", chunk.weights)
        self._write("records", chunk.numbers - 1 + first_of_file)
        self._write("checksums", np.array(checksums, np.uint32))
        if chunk.extras.size:
            self._write(EXTRAS, chunk.extras)
        self._images.add(chunk.images, chunk.file, self.num_samples)
        self.num_tokens += len(chunk.ids)
        self.num_runs += len(runs.lengths)
        self.num_samples += len(chunk.lengths)

    def flush(self) -> None:
        """Flushes to the operating system; a full disk is noticed here at the latest."""
        for file in self._files.values():
            file.flush()

    def _write(self, name: str, values: NDArray[Any]) -> None:
        if name not in self._files:
            self._files[name] = (self._folder / name).open("wb")
            self._digests[name], self._sizes[name] = hashlib.sha256(), 0
        data = np.ascontiguousarray(values, _ALL_DTYPES[name]).tobytes()
        self._files[name].write(data)
        self._digests[name].update(data)
        self._sizes[name] += len(data)

    def facts(self) -> dict[str, dict[str, Any]]:
        """Returns the size in bytes and the SHA-256 of each array, by name."""
        return {name: {"bytes": self._sizes[name], "sha256": self._digests[name].hexdigest()} for name in self._files}


def fingerprint_of(facts: dict[str, dict[str, Any]]) -> str:
    """Identifies everything that training reads, whatever the form, path and numbering of the records."""
    return hashlib.sha256("".join(facts[name]["sha256"] for name in _OF_TRAINING if name in facts).encode()).hexdigest()


_FACTS = "entry.json"
_MOST_NAMED = 10
"""Number of bad records whose faults are stored."""
FORMAT = 1
"""Version of an entry's files, part of its key; incremented when their meaning changes."""


class DamagedEntryError(Exception):
    """An entry cannot be used; it can be rebuilt."""


class TokenCache:
    """Samples of one source in the order of its records; thread-safe."""

    def __init__(self, folder: Path, files: tuple[RecordFile, ...], file_digests: tuple[str, ...]) -> None:
        """Maps the arrays and verifies all but the tokens, which `read` verifies; raises DamagedEntryError."""
        self.folder, self.files, self.file_digests = folder, files, file_digests
        facts = _read_facts(folder)
        self.num_records: int = facts["num_records"]
        """Includes bad records."""
        self.file_starts: tuple[int, ...] = tuple(facts["file_starts"])
        """Number of records before each file."""
        self.highest_id: int = facts["highest_id"]
        self.num_bad: int = facts["bad"]["count"]
        self._first_bad: list[tuple[int, int, str]] = facts["bad"]["first"]
        arrays = {name: _mapped(folder, name, facts["arrays"][name]) for name in DTYPES}
        self._ids, self._run_lengths, self._run_weights = (arrays[name] for name in OF_SAMPLES)
        self.starts: NDArray[np.int64] = arrays["offsets"]
        """[samples + 1]: first token of each sample when all are laid end to end."""
        self._run_offsets = arrays["run_offsets"]
        self._records, self._checksums = arrays["records"], arrays["checksums"]
        self.weights: NDArray[np.float64] = arrays["weights"]
        """[samples]: weight of each sample; negative for an unwanted answer."""
        fact = facts["arrays"].get(EXTRAS)
        extras = np.empty(0, np.float32) if fact is None else _mapped(folder, EXTRAS, fact)
        self.extras: NDArray[np.float32] = extras.reshape(self.num_tokens, -1)
        """[tokens, extras] of all samples laid end to end, mapped from disk."""
        kept = facts["arrays"]
        images = {name: _mapped(folder, name, kept[name]) for name in IMAGE_DTYPES if name in kept}
        self.images = ImageStore(folder, images, [file.path.parent for file in files]) if images else None
        """Images of the samples; None if no sample has any."""
        self.fingerprint = fingerprint_of(facts["arrays"])
        """Fingerprint of the samples, whatever the form and path of their files."""

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Returns [samples]: tokens in each sample."""
        return np.diff(self.starts)

    @cached_property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Returns [samples]: tokens of each sample before the first one in the loss."""
        first = self._run_offsets[:-1]
        return np.where(self._run_weights[first] > 0, 0, self._run_lengths[first]).astype(np.int64)

    def read(self, index: int) -> TokenizedSample:
        """Reads a sample; raises DataError if its checksum does not match."""
        start, end = self.starts[index], self.starts[index + 1]
        images = () if self.images is None else tuple(self.images.read(index))
        low, high = self._run_offsets[index], self._run_offsets[index + 1]
        ids, lengths, weights = self._ids[start:end], self._run_lengths[low:high], self._run_weights[low:high]
        extras = self.extras[start:end]
        if checksum(ids, lengths, weights, extras) != self._checksums[index]:
            raise DataError(
                f"{self.folder}: the tokens of sample {index} ({self.location(index)}) are not those that were "
                "written; remove this folder, which the next start rebuilds, and check the disk"
            )
        weight = float(self.weights[index])
        return TokenizedSample(np.array(ids), np.repeat(weights, lengths), weight, np.array(extras), images)

    def last_ids(self, numbers: range) -> NDArray[np.int32]:
        """Returns the last token of each of these samples."""
        last: NDArray[np.int32] = self._ids[self.starts[numbers.start + 1 : numbers.stop + 1] - 1]
        return last

    def ids(self, index: int) -> NDArray[np.int32]:
        """Returns the token ids of a sample, unverified and without its images."""
        ids: NDArray[np.int32] = self._ids[self.starts[index] : self.starts[index + 1]]
        return ids

    def record(self, index: int) -> int:
        """Returns the number of a sample's record in the source, counted from 0, bad records included."""
        return int(self._records[index])

    def location(self, index: int) -> str:
        """Returns the file and record of a sample, for messages."""
        record = self.record(index)
        file = int(np.searchsorted(self.file_starts, record, side="right")) - 1
        return self.files[file].place(record - self.file_starts[file] + 1)

    def bad_records(self) -> list[str]:
        return [f"{self.files[file].place(number)}: {why}" for file, number, why in self._first_bad]

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
        counted: NDArray[np.bool_] = np.repeat(self._run_weights > 0, self._run_lengths)
        counted[self.starts[:-1]] = False
        return counted

    @cached_property
    def _runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Returns for each run: its end, the trained tokens up to there, and whether it is trained."""
        is_trained = self._run_weights > 0
        trained = np.cumsum(np.where(is_trained, self._run_lengths, 0), dtype=np.int64)
        return np.cumsum(self._run_lengths, dtype=np.int64), trained, is_trained


class EntryFacts:
    """Facts of an entry, counted while its arrays are written."""

    def __init__(self) -> None:
        self.num_records = self.num_bad = self._highest_id = 0
        self.bad: list[tuple[int, int, str]] = []
        """(file, record in the file, fault) of the first few bad records."""
        self._file_starts: list[int] = []

    def first_of_file(self, chunk: EncodedChunk) -> int:
        """Returns the number of records before the chunk's file; one without records begins where the next one does."""
        while len(self._file_starts) <= chunk.file:
            self._file_starts.append(self.num_records)
        return self._file_starts[chunk.file]

    def add(self, chunk: EncodedChunk) -> None:
        self.num_records += chunk.num_records
        self.num_bad += len(chunk.bad)
        room = _MOST_NAMED - len(self.bad)
        self.bad += [(chunk.file, number, why) for number, why in chunk.bad[:room]]
        if len(chunk.ids):
            self._highest_id = max(self._highest_id, int(chunk.ids.max()))

    def write(self, folder: Path, arrays: dict[str, dict[str, Any]], num_files: int) -> None:
        content = {
            "format": FORMAT,
            "arrays": arrays,
            "file_starts": [*self._file_starts, *[self.num_records] * (num_files - len(self._file_starts))],
            "num_records": self.num_records,
            "highest_id": self._highest_id,
            "bad": {"count": self.num_bad, "first": self.bad},
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
    path, dtype = folder / name, np.dtype(_ALL_DTYPES[name])
    try:
        size = path.stat().st_size
        if size != fact["bytes"]:
            raise DamagedEntryError(f"{name} has {size} bytes, not {fact['bytes']}")
        values = np.memmap(path, dtype, mode="r")
    except OSError as fault:
        raise DamagedEntryError(f"{name}: {fault.strerror or fault}") from fault
    if name not in LARGE and hashlib.sha256(values.data).hexdigest() != fact["sha256"]:
        raise DamagedEntryError(f"{name} is not what was written")
    return values
