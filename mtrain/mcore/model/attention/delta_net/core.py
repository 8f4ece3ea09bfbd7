"""Convolution and delta rule of a layer's heads."""

from __future__ import annotations

from torch import Tensor

from mtrain.mcore.model.attention.delta_net.rule import row_chunks
from mtrain.mcore.model.attention.recurrent.chunks import Chunks, Projected
from mtrain.mcore.model.attention.recurrent.core import RecurrentCore


class DeltaNetCore(RecurrentCore):
    """What replaces core attention in a delta net."""

    def chunks(self, tokens: Projected, document_starts: Tensor | None) -> Chunks:
        """Solves the chunks of rows by the delta rule."""
        return row_chunks(tokens, document_starts, self.chunk)
