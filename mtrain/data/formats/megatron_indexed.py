"""Tokenised corpora on disk: Megatron's `.bin/.idx` pairs, checked before they are read, and written.

`.bin` has the tokens in sequence. `.idx` has: 9 bytes of magic, version (u64), element type (u8), number of sequences n
(u64) and of document edges d (u64), then n lengths (i32), n byte offsets (i64) and d edges (i64). A document is the
sequences between two edges.

megatron-core reads the pair. Its import takes seconds, so it happens when the first corpus is opened, and the writer is
our own: byte for byte the same files.
"""

import hashlib
import itertools
import re
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults, replacing
from mtrain.base.ground import require_ground
from mtrain.base.imports import settle_gpu_packages, without_trackers
from mtrain.base.spelling import counted
from mtrain.base.steady_files import retried

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
ELEMENTS: dict[int, str] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Element type of each code in the header; the two codes of floats are left out."""
_VERSION = 1
_TOKENS = "~"
"""Beginning of the part of a fingerprint that depends on tokens."""
_NUM_BLOCKS, _BLOCK_BYTES = 64, 1 << 14
_REBUILD = "copy or build the pair again"


class Corpus:
    """The documents of one `.bin/.idx` pair."""

    def __init__(self, prefix: str, vocab_size: int) -> None:
        """Args:
        vocab_size: Every token must be below it."""
        self.bin_path, self.idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self._vocab_size = vocab_size
        # before megatron-core opens it: IndexedDataset trusts the header and maps as much as it promises
        element = _check_header(self.idx_path, self.bin_path)
        with _library() as library:
            self._dataset: Any = retried(lambda: library.IndexedDataset(prefix), self.idx_path)
        lengths, edges = self._dataset.sequence_lengths, self._dataset.document_indices
        _check_lengths(self.idx_path, self.bin_path, lengths, self._dataset.index.sequence_pointers, element.itemsize)
        _check_edges(self.idx_path, edges, len(lengths))
        self._edges: NDArray[np.int64] = edges
        self._lengths: NDArray[np.int32] = lengths
        self.document_lengths = _document_lengths(lengths, edges)
        """[documents]: tokens of each document, in file order; a document may be empty."""
        self.fingerprint = retried(lambda: _fingerprint(self.idx_path, self.bin_path), prefix)
        """Changes when documents are added, removed or cut differently, or when tokens change in one of the sampled
        blocks; see `same_fingerprint`."""

    def read(self, document: int, offset: int, length: int) -> NDArray[np.int64]:
        """Reads [length] tokens of a document, from its token `offset` on; refuses tokens outside the vocabulary."""
        pieces: list[NDArray[np.int64]] = []
        for sequence in range(int(self._edges[document]), int(self._edges[document + 1])):
            size = int(self._lengths[sequence])
            # a document may consist of several sequences (IndexedDatasetBuilder.add_document)
            count = min(size - offset, length)
            if count > 0:
                pieces.append(self._dataset.get(sequence, offset, count).astype(np.int64))
                length -= count
            offset = max(0, offset - size)
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        # at each read: a check at the start would read the whole corpus
        wrong = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if wrong.size:
            raise DataError(
                f"{self.bin_path}: document {document} holds token {wrong[0]}, but model.vocab_size is "
                f"{self._vocab_size}; tokenise the corpus with the model's tokenizer or raise model.vocab_size"
            )
        return tokens


class Pair(NamedTuple):
    """Facts of a pair that are known without reading its tokens."""

    num_documents: int
    num_tokens: int


def check_pair(prefix: str, vocab_size: int) -> Pair:
    """Checks a pair as `Corpus` does, and a few blocks of tokens; loads neither megatron-core nor torch."""
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    with disk_faults(f"read the corpus {prefix}"):
        element = _check_header(idx_path, bin_path)
        with idx_path.open("rb") as file:
            *_, num_sequences, num_edges = HEADER.unpack(file.read(HEADER.size))
            lengths = np.fromfile(file, np.int32, num_sequences)
            pointers = np.fromfile(file, np.int64, num_sequences)
            edges = np.fromfile(file, np.int64, num_edges)
        _check_lengths(idx_path, bin_path, lengths, pointers, element.itemsize)
        _check_edges(idx_path, edges, num_sequences)
        for start, block in _sampled(bin_path, element.itemsize):
            tokens = np.frombuffer(block, element)
            wrong = tokens[(tokens.astype(np.int64) < 0) | (tokens.astype(np.int64) >= vocab_size)]
            if wrong.size:
                raise DataError(
                    f"{bin_path}: after byte {start} comes token {wrong[0]}, but model.vocab_size is {vocab_size}; "
                    "tokenise the corpus with the model's tokenizer or raise model.vocab_size"
                )
    return Pair(num_edges - 1, int(lengths.sum(dtype=np.int64)))


@contextmanager
def _library() -> Iterator[ModuleType]:
    """Imports megatron-core's dataset module, without its warnings."""
    require_ground()
    import torch

    settle_gpu_packages(torch.cuda.is_available())  # megatron-core's other modules are imported with it
    with warnings.catch_warnings(), without_trackers():
        warnings.simplefilter("ignore")  # its import warns of every optional package that is missing
        from megatron.core.datasets import indexed_dataset
    yield indexed_dataset


def _size(path: Path, partner: Path) -> int:
    if not path.is_file():
        there = "exists" if partner.is_file() else "does not exist either"
        raise DataError(
            f"{path} does not exist ({partner.name} {there}); a corpus needs both files, and its path in the "
            "configuration is the prefix without .bin and .idx"
        )
    return path.stat().st_size


def _check_header(idx_path: Path, bin_path: Path) -> np.dtype[Any]:
    """Compares the header with the file's size; returns the element type."""
    size = _size(idx_path, bin_path)
    _size(bin_path, idx_path)
    if size < HEADER.size:
        raise DataError(f"{idx_path} has {size} bytes, but its header alone needs {HEADER.size}; {_REBUILD}")
    with idx_path.open("rb") as file:
        magic, version, code, sequences, edges = HEADER.unpack(file.read(HEADER.size))
    if magic != MAGIC or version != 1:
        raise DataError(
            f"{idx_path} begins with {magic!r} and version {version}, but Megatron's index begins with {MAGIC!r} and "
            f"version 1; {_REBUILD}"
        )
    if code not in ELEMENTS:
        raise DataError(
            f"{idx_path} says that elements have type code {code}, but tokens need an integer type, one of "
            f"{', '.join(f'{code} ({name})' for code, name in ELEMENTS.items())}; {_REBUILD}"
        )
    # a length (4 bytes) and an offset (8) for each sequence
    expected = HEADER.size + sequences * 12 + edges * 8
    # a multimodal index has one more byte for each sequence, its mode
    if size == expected + sequences and sequences > 0:
        raise DataError(f"{idx_path} is a multimodal index, which is not supported; build it from text alone")
    if size != expected:
        raise DataError(
            f"{idx_path} has {size} bytes, but its header promises {counted(sequences, 'sequence')} and {edges} "
            f"document edges, which are {expected} bytes: it is {'truncated' if size < expected else 'damaged'}; "
            f"{_REBUILD}"
        )
    if sequences == 0 or edges == 0:
        raise DataError(f"{idx_path} holds no documents; build the corpus from files that hold text")
    if bin_path.stat().st_size == 0:
        raise DataError(f"{bin_path} is empty; {_REBUILD}")
    return np.dtype(ELEMENTS[code])


def _check_lengths(
    idx_path: Path, bin_path: Path, lengths: NDArray[np.int32], pointers: NDArray[np.int64], itemsize: int
) -> None:
    """Checks that the sequences follow each other and fill the .bin exactly."""
    # offsets are redundant, so they show damage that keeps the size
    if lengths.min() < 0 or pointers[0] != 0 or np.any(np.diff(pointers) != lengths[:-1].astype(np.int64) * itemsize):
        raise DataError(f"{idx_path}: its byte offsets do not follow from its lengths, so it is damaged; {_REBUILD}")
    expected = int(lengths.sum(dtype=np.int64)) * itemsize
    size = bin_path.stat().st_size
    if size != expected:
        raise DataError(
            f"{bin_path} has {size} bytes, but {idx_path.name} promises {counted(expected // itemsize, 'token')} of "
            f"{itemsize} bytes, which are {expected}: the two files do not belong together or one is truncated; "
            f"{_REBUILD}"
        )


def _check_edges(idx_path: Path, edges: NDArray[np.int64], sequences: int) -> None:
    if edges[0] != 0 or edges[-1] != sequences or np.any(np.diff(edges) < 0):
        raise DataError(
            f"{idx_path}: its document edges run from {edges[0]} to {edges[-1]} and must ascend from 0 to the number "
            f"of sequences, {sequences}; {_REBUILD}"
        )


def _document_lengths(lengths: NDArray[np.int32], edges: NDArray[np.int64]) -> NDArray[np.integer[Any]]:
    if len(edges) == len(lengths) + 1 and np.array_equal(edges, np.arange(len(edges))):
        return lengths  # one sequence a document, as our own tools write; no copy
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return np.diff(ends[edges])


def same_fingerprint(saved: str, now: str) -> bool:
    """Compares fingerprints of data; those of version 0.1.0 do not depend on tokens."""
    return saved == (now if _TOKENS in saved else re.sub(rf"{_TOKENS}[0-9a-f]+", "", now))


def _fingerprint(idx_path: Path, bin_path: Path) -> str:
    """Hashes the index, the size of the .bin, and a few blocks of its tokens.

    Hashing terabytes of tokens at each start would take hours; corpora cut into equal documents have equal indices.
    """
    size = bin_path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with idx_path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    tokens = hashlib.sha256()
    for _, block in _sampled(bin_path, 1):
        tokens.update(block)
    return f"{digest.hexdigest()}{_TOKENS}{tokens.hexdigest()[:16]}"


def _sampled(bin_path: Path, itemsize: int) -> Iterator[tuple[int, bytes]]:
    """Yields (first byte, block) of a few blocks spread over a file; the first byte is a multiple of `itemsize`."""
    last = max(0, bin_path.stat().st_size - _BLOCK_BYTES)
    with bin_path.open("rb") as file:
        for number in range(_NUM_BLOCKS):
            start = number * last // (_NUM_BLOCKS - 1) // itemsize * itemsize
            file.seek(start)
            yield start, file.read(_BLOCK_BYTES)


def document_ranges(num_documents: int, split: Sequence[float]) -> list[range]:
    """Cuts documents in file order into consecutive parts; the shares in `split` sum to 1, edges are rounded to whole
    documents."""
    # shares are summed first and rounded once, so every document falls into exactly one part
    edges = [0, *(round(num_documents * share) for share in np.cumsum(split)[:-1]), num_documents]
    return [range(start, end) for start, end in itertools.pairwise(edges)]


class CorpusWriter:
    """Writes the documents of a new pair; see `writing_corpus`."""

    def __init__(self, file: BinaryIO, element: type[np.uint16] | type[np.int32]) -> None:
        self._file, self._element = file, element
        self._lengths: list[NDArray[np.int32]] = []
        self.num_documents = 0
        self.num_tokens = 0

    def add(self, tokens: NDArray[np.generic]) -> None:
        """Appends a document of one sequence; `tokens` are [length] integers."""
        self.add_all(tokens, [len(tokens)])

    def add_all(self, tokens: NDArray[np.generic], lengths: Sequence[int]) -> None:
        """Appends documents of one sequence each; `tokens` are [sum of the lengths] integers."""
        # no copy if the elements already have the type of the file
        self._file.write(np.ascontiguousarray(tokens, self._element).data)
        self._lengths.append(np.array(lengths, np.int32))
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)

    def write_index(self, path: Path) -> None:
        lengths = np.concatenate([np.empty(0, np.int32), *self._lengths])
        ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(self._element).itemsize
        (code,) = (code for code, name in ELEMENTS.items() if name == np.dtype(self._element).name)
        with path.open("wb") as file:
            file.write(HEADER.pack(MAGIC, _VERSION, code, len(lengths), len(lengths) + 1))
            file.write(lengths.data)
            file.write(np.concatenate([[0], ends])[: len(lengths)].astype(np.int64).data)
            file.write(np.arange(len(lengths) + 1, dtype=np.int64).data)


@contextmanager
def writing_corpus(prefix: str, vocab_size: int) -> Iterator[CorpusWriter]:
    """Writes a pair that appears whole when the block ends, or not at all.

    Elements are uint16 if the vocabulary allows it, else int32. The `.idx` appears last.
    """
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    with disk_faults(f"write the corpus {prefix}"):
        bin_path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(idx_path) as new_idx, replacing(bin_path) as new_bin:
            with new_bin.open("wb") as file:
                writer = CorpusWriter(file, element_type(vocab_size))
                yield writer
            writer.write_index(new_idx)
            idx_path.unlink(missing_ok=True)  # the index of an older pair does not fit the new tokens


def element_type(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Returns the smallest element type that Megatron's tools would choose for a vocabulary."""
    return np.uint16 if vocab_size < 65500 else np.int32
