"""Windows of a tokenised corpus, read from its two files directly.

`.idx`: 9 bytes of magic, version (u64), element type (u8), number of sequences n (u64) and of document edges d (u64), n
lengths (i32), n byte offsets (i64), d edges (i64). A document is the sequences between two edges. In an epoch the
documents are concatenated in some order, and window w holds tokens w s ... w s + s of that stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtrain.verify.reference.text import Text

_ELEMENTS = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_HEADER_BYTES = 34


@dataclass(frozen=True)
class RawCorpus:
    """Documents of one `.bin/.idx` pair."""

    tokens: NDArray[np.integer]
    """All tokens in file order, memory-mapped."""
    begins: NDArray[np.int64]
    """Position in `tokens` where each document begins, and the end of the last one, [documents + 1]."""

    @classmethod
    def open(cls, prefix: str) -> RawCorpus:
        """Opens both files and reads the index; they were checked before."""
        content = np.memmap(f"{prefix}.idx", np.uint8, "r")
        num_sequences, num_edges = content[18:_HEADER_BYTES].view("<u8").tolist()
        lengths_end = _HEADER_BYTES + 4 * num_sequences
        lengths = content[_HEADER_BYTES:lengths_end].view("<i4")
        edges = content[lengths_end + 8 * num_sequences :].view("<i8")[:num_edges]
        begins = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[edges]
        return cls(np.memmap(Path(f"{prefix}.bin"), _ELEMENTS[int(content[17])], "r"), begins)

    @property
    def num_documents(self) -> int:
        """Returns the number of documents."""
        return len(self.begins) - 1

    def window(self, order: NDArray[np.int64], index: int, seq_length: int, isolate: bool) -> Text:
        """Returns a window of the stream of documents in an order.

        Args:
            order: Numbers of the documents in the order of the stream.
            index: Index of the window.
            seq_length: Number of tokens that the window predicts.
            isolate: Whether the edges between documents are kept.
        """
        lengths = np.diff(self.begins)[order]
        ends = np.cumsum(lengths)
        first, last = index * seq_length, index * seq_length + seq_length + 1
        ids, edges = [], []
        for turn in np.flatnonzero((ends > first) & (ends - lengths < last)):
            start = int(ends[turn] - lengths[turn])
            here, there = max(first, start), min(last, int(ends[turn]))
            if here > first:
                edges.append(here - first)
            begin = int(self.begins[order[turn]]) - start
            ids.append(self.tokens[begin + here : begin + there].astype(np.int64))
        joined = np.concatenate(ids)
        return Text(joined, np.ones(len(joined)), edges=tuple(edges) if isolate else ())
