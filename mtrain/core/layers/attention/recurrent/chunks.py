"""States of rows of documents, chunk by chunk.

A layer's rule gives the effect of a chunk's tokens on a still unknown state (`Chunks`). The loop over chunks carries
one state, and is the same for every rule. Documents begin anywhere in a chunk: a span of tokens that crosses a
document's start has the decay 0, so nothing passes from one document to the next, whatever the chunks.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mtrain.core.layers.products import widened


class Projected(NamedTuple):
    """What tokens give to a rule, in any dtypes; it computes in float32 at least."""

    query: Tensor
    """[seq, batch, key_heads, key_dim], of any length."""
    key: Tensor
    """Keys, in the shape of query."""
    value: Tensor
    """[seq, batch, value_heads, value_dim]; each key head serves value_heads / key_heads adjacent ones."""
    log_decay: Tensor
    """[seq, batch, value_heads], never above 0."""
    beta: Tensor
    """Steps, in the shape of log_decay."""


class Chunks(NamedTuple):
    """What a row does to states, by chunk; [batch, key_heads, shared, chunks, ...], `shared` value heads to a key.

    With the state S at the start of a chunk, its corrections are `values - erasing S`, its outputs
    `reading S + attention corrections`, and its last state `decay S + writing^T corrections`.
    """

    values: Tensor
    """[..., chunk, value_dim] corrections from an empty state."""
    erasing: Tensor | None
    """[..., chunk, key_dim]; 0 where the document begins in the chunk. None: no correction depends on the state."""
    reading: Tensor
    """[..., chunk, key_dim] queries that see the start of the chunk."""
    attention: Tensor
    """[..., chunk, chunk] products of queries with keys not after them, decayed."""
    writing: Tensor
    """[..., chunk, key_dim] keys whose document reaches the end of the chunk."""
    decay: Tensor
    """[..., 1, 1]; 0 where a document begins in the chunk."""


def applied(chunks: Chunks, value: Tensor, state: Tensor | None, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Carries states through rows and returns the outputs of their tokens, whose values are [seq, batch, value_heads,
    value_dim], and the state after the last one.

    Args:
        state: [batch, value_heads, key_dim, value_dim] before the first token; None: 0.
        skip: [value_heads] factors with which values are added to the outputs; None: they are not.
    """
    output, after = scan(chunks, state)
    output = output[: len(value)]
    if skip is not None:
        output = output + skip.to(output.dtype).unsqueeze(-1) * value.to(output.dtype)
    return output.to(value.dtype), after


def scan(chunks: Chunks, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Carries states, [batch, value_heads, key_dim, value_dim], through the chunks of every row; None: 0 at the start.

    Returns:
        Outputs, [chunks x chunk, batch, value_heads, value_dim], and the states at the end.
    """
    batch, heads, shared = chunks.values.shape[:3]
    size = chunks.writing.shape[-1], chunks.values.shape[-1]
    if state is None:
        state = chunks.values.new_zeros(batch, heads * shared, *size)
    state = state.to(chunks.values.dtype).view(batch, heads, shared, *size)
    states, corrections, state = _carried(chunks, state)
    # outputs need no order, so they are one product for all chunks
    output = chunks.reading @ states + chunks.attention @ corrections
    return output.flatten(3, 4).flatten(1, 2).permute(2, 0, 1, 3), state.flatten(1, 2)


def transition(chunks: Chunks) -> Tensor:
    """Returns how the states after each row follow from those before it, S -> carrying S + update: both side by side,
    [batch, value_heads, key_dim, value_dim + key_dim]."""
    value_dim, key_dim = chunks.values.shape[-1], chunks.writing.shape[-1]
    # a state of more columns, which no values correct: what they hold at first is carried alone
    wider = chunks._replace(values=functional.pad(chunks.values, (0, key_dim)))
    identity = functional.pad(torch.eye(key_dim).to(wider.values), (value_dim, 0))
    return _carried(wider, identity.expand(*wider.values.shape[:3], -1, -1))[2].flatten(1, 2)


def _carried(chunks: Chunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the state before each chunk and its corrections, [..., chunks, ...] each, and the last state."""
    states, corrections = [], []
    if chunks.erasing is None:
        updates = chunks.writing.mT @ chunks.values
        for update, decay in zip(updates.unbind(3), chunks.decay.unbind(3), strict=True):
            states.append(state)
            state = decay * state + update
        return torch.stack(states, 3), chunks.values, state
    # unbound together, not indexed: in backward each index would fill a whole row with zeros
    steps = (part.unbind(3) for part in (chunks.values, chunks.erasing, chunks.writing, chunks.decay))
    for values, erasing, writing, decay in zip(*steps, strict=True):
        correction = values - erasing @ state
        states.append(state)
        corrections.append(correction)
        state = decay * state + writing.mT @ correction
    return torch.stack(states, 3), torch.stack(corrections, 3), state


class Decays(NamedTuple):
    """What is left of what tokens hold, by chunk; 0 across the start of a document."""

    between: Tensor
    """[..., chunk, chunk]: at token i of what token j added."""
    from_start: Tensor
    """[..., chunk]: at each token of the state before the chunk."""


def chunk_decays(log_decay: Tensor, document_starts: Tensor | None, seq: int) -> Decays:
    """Computes the decays of every chunk from log decays of `by_chunk`, [batch, key_heads, shared, chunks, chunk], and
    document starts as in `delta_rule`; `seq` counts tokens without padding."""
    chunk = log_decay.shape[-1]
    spans, from_start = _sums(log_decay)
    order = torch.ones(chunk, chunk, dtype=torch.bool, device=log_decay.device).tril()
    if document_starts is not None:
        seen, sees_start = _inside_documents(document_starts.to(log_decay.device), seq, chunk)
        order = order & seen
        from_start = from_start.masked_fill(~sees_start, -math.inf)
    # masked before the exponential: 0, with the gradient 0
    return Decays(spans.masked_fill(~order, -math.inf).exp(), from_start.exp())


def by_chunk(part: Tensor, key_heads: int, chunk: int) -> Tensor:
    """Lays out [seq, batch, heads, ...] as [batch, key_heads, shared, chunks, chunk, ...], at least in float32.

    The row is padded to whole chunks by tokens that do not change states: their keys, steps and log decays are 0.
    """
    part = widened(part)
    missing = -len(part) % chunk
    part = functional.pad(part, (0, 0) * (part.dim() - 1) + (0, missing))
    part = torch.unflatten(torch.unflatten(part, 0, (-1, chunk)), 3, (key_heads, -1))
    return part.permute(2, 3, 4, 0, 1, *range(5, part.dim()))


def _sums(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Sums log decays: [..., chunk, chunk] of the tokens after j up to i, and [..., chunk] of those up to each."""
    # A span is the difference of two sums. In float32 a strong decay earlier in the chunk would take the bits of the
    # weak ones after it, even where it belongs to another document. A product, since torch refuses cumsum on a GPU in
    # a deterministic run.
    size = log_decay.shape[-1]
    sums = log_decay.double() @ torch.ones(size, size, dtype=torch.float64, device=log_decay.device).triu()
    spans = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    return spans.to(log_decay.dtype), sums.to(log_decay.dtype)


def _inside_documents(document_starts: Tensor, seq: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Says which pairs of tokens of a chunk are in one document, [batch, 1, 1, chunks, chunk, chunk] bool, and which
    tokens continue one from before the chunk, [batch, 1, 1, chunks, chunk]."""
    # padding continues the last document
    missing = -seq % chunk
    starts = torch.cat((document_starts, document_starts[:, -1:].expand(-1, missing)), dim=1)
    starts = torch.unflatten(starts, 1, (-1, chunk))
    places = torch.arange(seq + missing, device=starts.device).view(-1, chunk)
    same = starts.unsqueeze(-1) <= places.unsqueeze(-2)
    return same[:, None, None], (starts < places[:, :1])[:, None, None]
