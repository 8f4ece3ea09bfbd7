"""Windows of running text from a tokenised corpus.

Training: in each epoch the documents are shuffled and laid end to end, and the stream is cut into windows that overlap
by one token: window w holds tokens w*s ... w*s + s and predicts the last s. The stream's first token is never
predicted, and the tokens after the last full window (fewer than s, other text in every epoch) are not seen. `order.py`
defines the order of the windows.

Validation: documents in file order, every window once and in order, the last one partly filled if necessary, so that
every token but the first is predicted exactly once.
"""

import functools

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.core.batch.order import key_of, permutation
from mtrain.core.batch.sample import Sample, shifted
from mtrain.data.formats.megatron_indexed import Corpus

_DOCUMENT_ORDER = 1
"""Part of the key that separates the permutation of documents from that of windows, which has the same seed."""


class PretrainDataset:
    """Documents of a corpus as windows of seq_length tokens; a window is a sequence for the loss."""

    def __init__(
        self,
        corpus: Corpus,
        documents: range,
        seq_length: int,
        isolate_documents: bool,
        shuffle_key: tuple[int, ...] | None,
    ) -> None:
        """Args:
        isolate_documents: Whether attention and positions start again at each document, and no token is predicted
            across an edge.
        shuffle_key: Seed and number of the source, for training; None reads the documents in order, for validation."""
        self._corpus, self._documents, self._seq_length = corpus, documents, seq_length
        self._isolate, self._shuffle_key = isolate_documents, shuffle_key
        self._lengths = corpus.document_lengths[documents.start : documents.stop]
        # lengths are int32, and a corpus has more than 2^31 tokens
        self.num_tokens = int(self._lengths.sum(dtype=np.int64))
        predicted = max(0, self.num_tokens - 1)
        # training drops an incomplete window (other text in every epoch); validation must count every token
        self._size = predicted // seq_length if shuffle_key is not None else -(-predicted // seq_length)
        self.fingerprint = f"{corpus.fingerprint}-{documents.start}-{documents.stop}-{seq_length}"
        if self._size == 0:
            needed = seq_length + 1 if shuffle_key is not None else 2
            raise DataError(
                f"{corpus.bin_path}: its {counted(len(documents), 'document')} from number {documents.start} on "
                f"{'holds' if len(documents) == 1 else 'hold'} {counted(self.num_tokens, 'token')}, but one sample "
                f"needs {needed}; give more text, another data.split or a smaller data.seq_length"
            )
        self._stream = functools.lru_cache(maxsize=2)(self._build_stream)  # an epoch and the next, while both are read

    def __len__(self) -> int:
        return self._size

    def sample(self, epoch: int, index: int) -> Sample:
        """Returns window `index` of an epoch's stream."""
        order, starts = self._stream(epoch if self._shuffle_key is not None else 0)
        first = index * self._seq_length
        last = min(first + self._seq_length + 1, self.num_tokens)
        ids, edges = self._read(order, starts, first, last)
        mask = np.ones(len(ids) - 1)
        if not self._isolate:
            return shifted(ids, mask)
        mask[edges - 1] = 0.0  # the token before an edge would predict the next document's first
        document_starts = np.zeros(len(ids) - 1, np.int32)
        inner = edges[edges < len(ids) - 1]
        # a start at each edge; the running maximum then spreads it over its document
        document_starts[inner] = inner
        return shifted(ids, mask, document_starts=np.maximum.accumulate(document_starts))

    def why_nothing(self) -> str | None:
        """Explains why no window has anything to learn; None if one has."""
        if not self._isolate or self._lengths.max() > 1:
            return None
        return (
            f"its {counted(len(self._documents), 'document', ',')} {'has' if len(self._documents) == 1 else 'have'} "
            "one token at most, which data.isolate_documents keeps apart"
        )

    def widths(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [n]: positions of windows; all but the last one of a validation set are full."""
        return np.clip(self.num_tokens - 1 - indices * self._seq_length, 1, self._seq_length)

    def document_order(self, epoch: int) -> NDArray[np.int64]:
        """Returns [n] int64: the documents in the order of an epoch, counted from the first one in use."""
        count = len(self._documents)
        if self._shuffle_key is None:
            return np.arange(count)
        return permutation(count, key_of(_DOCUMENT_ORDER, *self._shuffle_key, epoch))

    def _build_stream(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the documents in the epoch's order, [n], and their starts in the stream, [n + 1]; 16 bytes each."""
        order = self.document_order(epoch)
        starts = np.zeros(len(order) + 1, np.int64)
        np.cumsum(self._lengths[order], out=starts[1:])
        return order, starts

    def _read(
        self, order: NDArray[np.int64], starts: NDArray[np.int64], first: int, last: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns tokens first ... last - 1 of the stream, and the positions at which new documents begin (never 0)."""
        # right: skips empty documents that begin at `first`
        turn = int(np.searchsorted(starts, first, side="right")) - 1
        pieces: list[NDArray[np.int64]] = []
        edges: list[int] = []
        position = first
        while position < last:
            end = min(int(starts[turn + 1]), last)
            if end > position:
                if position > first:
                    edges.append(position - first)
                document = self._documents.start + int(order[turn])
                pieces.append(self._corpus.read(document, position - int(starts[turn]), end - position))
                position = end
            turn += 1
        return np.concatenate(pieces), np.array(edges, np.int64)
