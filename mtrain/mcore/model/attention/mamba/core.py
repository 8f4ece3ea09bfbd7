"""Selective state space of Mamba-2 on rows of documents, chunk by chunk.

Each head has a state S, [state_dim, head_dim]; the heads of a group share a key B and a query C. A token with input x,
log decay g and step d decays the state, adds to it, and reads it:

    S <- exp(g) S + d B x^T
    output = S^T C

Unlike in the delta rule, what a token adds does not depend on the state, so a chunk needs sums alone.

Source: Dao, Gu, "Transformers are SSMs", 2024, arXiv 2405.21060, section 6.
"""

from __future__ import annotations

from torch import Tensor

from mtrain.mcore.model.attention.recurrent.chunks import Chunks, Projected, by_chunk, chunk_decays
from mtrain.mcore.model.attention.recurrent.core import RecurrentCore


class MambaCore(RecurrentCore):
    """What replaces core attention in Mamba-2; a group of heads is a key head, whose key is B and whose query is C."""

    def chunks(self, tokens: Projected, document_starts: Tensor | None) -> Chunks:
        """Sums the chunks of rows by the rule of Mamba-2."""
        return row_chunks(tokens, document_starts, self.chunk)


def row_chunks(tokens: Projected, document_starts: Tensor | None, chunk: int) -> Chunks:
    """Sums what the tokens of every chunk add to a state that is not known yet.

    Args:
        tokens: Queries C, keys B, values x, log decays and steps.
        document_starts: [batch, seq] index at which each token's document starts, counted from the first one given;
            negative: before that. None: no document starts after the first token.
        chunk: Number of tokens of a chunk.
    """
    seq, _, groups, _ = tokens.key.shape
    query, key, value, log_decay, step = (by_chunk(part, groups, min(chunk, seq)) for part in tokens)
    decays, from_start = chunk_decays(log_decay, document_starts, seq)
    return Chunks(
        values=step.unsqueeze(-1) * value,
        erasing=None,
        reading=from_start.unsqueeze(-1) * query,
        attention=(query @ key.mT) * decays,
        # the last row has the decays from each token to the end of the chunk
        writing=decays[..., -1, :].unsqueeze(-1) * key,
        decay=from_start[..., -1][..., None, None],
    )
