"""Tokenised samples on disk: plain arrays, one after the other, that are mapped into memory and never loaded whole.

The weights of tokens are kept as runs of equal weights: a conversation has few runs, and a sample with a weight for
every token loses nothing. Runs are as long as possible, so the same samples give the same bytes.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mtrain.core.batch.sample import TokenizedSample

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
_ALL_DTYPES = DTYPES | {EXTRAS: np.float32}
OF_SAMPLES = ("ids", "run_lengths", "run_weights")
"""Large arrays, verified sample by sample when they are read; the others are verified when the entry is opened."""

_OF_TRAINING = ("ids", "offsets", "run_lengths", "run_weights", "run_offsets", "weights", EXTRAS)
"""Arrays that training reads; the fingerprint of the data covers them."""


class EncodedChunk(NamedTuple):
    """Samples of consecutive records, as a worker returns them."""

    file: int
    """Number of the file in the source."""
    first: int
    """Number of the first record in its file, counted from 1."""
    num_records: int
    """Bad records are counted too."""
    ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    run_lengths: NDArray[np.int32]
    run_weights: NDArray[np.float32]
    run_counts: NDArray[np.int32]
    weights: NDArray[np.float64]
    numbers: NDArray[np.int64]
    """Number of each sample's record in its file, counted from 1."""
    extras: NDArray[np.float32]
    """[tokens, extras]; nothing where data.extras names none."""
    bad: tuple[tuple[int, str], ...]
    """Number and fault of each bad record."""


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


def checksum(
    ids: NDArray[np.int32],
    run_lengths: NDArray[np.int32],
    run_weights: NDArray[np.float32],
    extras: NDArray[np.float32],
) -> int:
    """Computes the CRC-32 of one sample."""
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
    runs = runs_of(_joined([sample.loss_weights for _, sample in samples], np.float32), lengths)
    return EncodedChunk(
        file,
        first,
        num_records,
        ids=_joined([sample.ids for _, sample in samples], np.int32),
        lengths=lengths,
        run_lengths=runs.lengths,
        run_weights=runs.weights,
        run_counts=runs.counts,
        weights=np.array([sample.weight for _, sample in samples], np.float64),
        numbers=np.array([number for number, _ in samples], np.int64),
        extras=_joined([sample.extras for _, sample in samples if sample.extras is not None], np.float32),
        bad=tuple(bad),
    )


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


class ArrayWriter:
    """Writes the arrays of a new entry, one after the other; use it in a `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._digests = {name: hashlib.sha256() for name in DTYPES}
        self._sizes: dict[str, int] = {}
        self.num_tokens = self.num_runs = self.num_samples = 0

    def __enter__(self) -> Self:
        for name in DTYPES:
            self._open(name)
        self._write("offsets", np.zeros(1, np.int64))
        self._write("run_offsets", np.zeros(1, np.int64))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def add(self, chunk: EncodedChunk, first_of_file: int) -> None:
        """Appends the samples of a chunk; `first_of_file` records lie in the files before."""
        ends = np.cumsum(chunk.lengths, dtype=np.int64)
        run_ends = np.cumsum(chunk.run_counts, dtype=np.int64)
        checksums = [
            checksum(
                chunk.ids[start:end],
                chunk.run_lengths[low:high],
                chunk.run_weights[low:high],
                chunk.extras[start:end],
            )
            for start, end, low, high in zip(ends - chunk.lengths, ends, run_ends - chunk.run_counts, run_ends)
        ]
        self._write("ids", chunk.ids)
        self._write("run_lengths", chunk.run_lengths)
        self._write("run_weights", chunk.run_weights)
        self._write("offsets", ends + self.num_tokens)
        self._write("run_offsets", run_ends + self.num_runs)
        self._write("weights", chunk.weights)
        self._write("records", chunk.numbers - 1 + first_of_file)
        self._write("checksums", np.array(checksums, np.uint32))
        if chunk.extras.size:
            self._write(EXTRAS, chunk.extras)
        self.num_tokens += len(chunk.ids)
        self.num_runs += len(chunk.run_lengths)
        self.num_samples += len(chunk.lengths)

    def _open(self, name: str) -> None:
        self._files[name] = (self._folder / name).open("wb")
        self._digests[name], self._sizes[name] = hashlib.sha256(), 0

    def flush(self) -> None:
        """Flushes to the operating system; a full disk is noticed here at the latest."""
        for file in self._files.values():
            file.flush()

    def _write(self, name: str, values: NDArray[Any]) -> None:
        if name not in self._files:
            self._open(name)
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
