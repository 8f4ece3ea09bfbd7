"""Gated delta rule on rows of documents, chunk by chunk.

Each value head has a state S, [key_dim, value_dim]. A token with unit-length query q and key k, value v, log decay g
and step beta decays it, corrects what it holds at k, and reads it at q:

    S <- exp(g) S
    S <- S + k (beta (v - S^T k))^T
    output = S^T q / sqrt(key_dim)

Inside a chunk the corrections are the solution of a triangular system, since each depends on those before it.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtrain.mcore.model.attention.recurrent.chunks import Chunks, Projected, applied, by_chunk, chunk_decays

EPSILON = 1e-6
"""Added to the squared length of a query or key before it is divided by its length."""


def delta_rule(
    tokens: Projected, document_starts: Tensor | None = None, chunk: int = 64, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Applies the gated delta rule to every row.

    Args:
        tokens: Queries, keys, values, log decays and steps.
        document_starts: [batch, seq] index at which each token's document starts, counted from the first one given;
            negative: before that. None: no document starts after the first token.
        chunk: Tokens of a chunk.
        state: [batch, value_heads, key_dim, value_dim] before the first token; None: 0.

    Returns:
        Outputs in the shape and dtype of value, and the state after the last token.
    """
    return applied(row_chunks(tokens, document_starts, chunk), tokens.value, state)


def row_chunks(tokens: Projected, document_starts: Tensor | None, chunk: int) -> Chunks:
    """Solves every chunk for a state that is not known yet; the arguments are those of `delta_rule`."""
    seq, _, heads, key_dim = tokens.key.shape
    chunk = min(chunk, seq)
    query, key, value, log_decay, beta = (by_chunk(part, heads, chunk) for part in tokens)
    query, key = _unit(query) / math.sqrt(key_dim), _unit(key)
    decays, from_start = chunk_decays(log_decay, document_starts, seq)
    beta = beta.unsqueeze(-1)
    # corrections + (part below the diagonal) corrections = beta (v - what the state at the start holds)
    system = beta * (key @ key.mT) * decays
    sides = torch.cat((beta * value, beta * from_start.unsqueeze(-1) * key), dim=-1)
    # the diagonal is taken as 1 and what is above it as 0, without a look
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, erasing = torch.split(solved, [value.shape[-1], key_dim], dim=-1)
    return Chunks(
        values=values,
        erasing=erasing,
        reading=from_start.unsqueeze(-1) * query,
        attention=(query @ key.mT) * decays,
        # the last row has the decays from each token to the end of the chunk
        writing=decays[..., -1, :].unsqueeze(-1) * key,
        decay=from_start[..., -1][..., None, None],
    )


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + EPSILON)
