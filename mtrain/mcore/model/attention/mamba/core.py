"""Convolution and selective state space of a layer's heads."""

from __future__ import annotations

from torch import Tensor

from mtrain.mcore.model.attention.mamba.rule import row_chunks
from mtrain.mcore.model.attention.recurrent.chunks import Chunks, Projected
from mtrain.mcore.model.attention.recurrent.core import RecurrentCore


class MambaCore(RecurrentCore):
    """What replaces core attention in Mamba-2; a group of heads is a key head, whose key is B and whose query is C."""

    def chunks(self, tokens: Projected, document_starts: Tensor | None) -> Chunks:
        """Sums the chunks of rows by the rule of Mamba-2."""
        return row_chunks(tokens, document_starts, self.chunk)
