"""Writes Megatron's `.bin/.idx` pairs (see `megatron_indexed`), byte for byte as megatron-core does.

Own code, since megatron-core's builder imports torch, which takes four seconds: longer than ten megabytes of text.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from mtrain.base.files import disk_faults, replacing

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
ELEMENTS: dict[int, str] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Element type of each code in the header; the two codes of floats are left out."""
_VERSION = 1


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
        # no copy where the elements have the type of the file already
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
            idx_path.unlink(missing_ok=True)  # an older pair's index does not fit the new tokens


def element_type(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Returns the smallest element type that Megatron's tools would choose for a vocabulary."""
    return np.uint16 if vocab_size < 65500 else np.int32
