"""Recurrent states of rows with documents, computed chunk by chunk.

The rule of a layer yields the effect of a chunk's tokens on a still unknown state (`Chunks`). The loop over chunks
carries one state and is the same for every rule. Documents may begin anywhere in a chunk: the decay across the start of
a document is 0, so nothing passes from one document to the next, wherever chunks end.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mtrain.core.layers.products import widened


class Projected(NamedTuple):
    """Projections of tokens, the input of a rule, in any dtypes; the rule computes in at least float32."""

    query: Tensor
    """[seq, batch, key_heads, key_dim]; vectors may have any length."""
    key: Tensor
    """Keys, in the shape of query."""
    value: Tensor
    """[seq, batch, value_heads, value_dim]; each key head serves value_heads / key_heads adjacent value heads."""
    log_decay: Tensor
    """[seq, batch, value_heads], never above 0."""
    beta: Tensor
    """Steps, in the shape of log_decay."""


class Chunks(NamedTuple):
    """Effect of a row on states, by chunk; [batch, key_heads, shared, chunks, ...] with `shared` value heads per key.

    For a state S at the start of a chunk, the corrections are `values - erasing S`, the outputs are `reading S +
    attention corrections`, and the state at the end is `decay S + writing^T corrections`.
    """

    values: Tensor
    """[..., chunk, value_dim] corrections from an empty state."""
    erasing: Tensor | None
    """[..., chunk, key_dim]; 0 if the document begins in the chunk. None: no correction depends on the state."""
    reading: Tensor
    """[..., chunk, key_dim] decayed queries; 0 for tokens whose document begins in the chunk."""
    attention: Tensor
    """[..., chunk, chunk] decayed products of queries and earlier keys (or their own)."""
    writing: Tensor
    """[..., chunk, key_dim] decayed keys; 0 for tokens whose document ends in the chunk."""
    decay: Tensor
    """[..., 1, 1]; 0 if a document begins in the chunk."""


def applied(chunks: Chunks, value: Tensor, state: Tensor | None, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Carries states through rows; returns the outputs in the shape of `value` and the state after the last token.

    Args:
        value: Values of the tokens, [seq, batch, value_heads, value_dim].
        state: State before the first token, [batch, value_heads, key_dim, value_dim]; None: 0.
        skip: Factors with which values are added to the outputs, [value_heads]; None: values are not added.
    """
    output, after = scan(chunks, state)
    output = output[: len(value)]
    if skip is not None:
        output = output + skip.to(output.dtype).unsqueeze(-1) * value.to(output.dtype)
    return output.to(value.dtype), after


def scan(chunks: Chunks, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Carries states, [batch, value_heads, key_dim, value_dim] (None: 0), through the chunks of every row.

    Returns:
        Outputs, [chunks x chunk, batch, value_heads, value_dim], and the states at the end.
    """
    batch, heads, shared = chunks.values.shape[:3]
    size = chunks.writing.shape[-1], chunks.values.shape[-1]
    if state is None:
        state = chunks.values.new_zeros(batch, heads * shared, *size)
    state = state.to(chunks.values.dtype).view(batch, heads, shared, *size)
    states, corrections, state = _carried(chunks, state)
    # outputs do not depend on each other, so one product computes those of all chunks
    output = chunks.reading @ states + chunks.attention @ corrections
    return output.flatten(3, 4).flatten(1, 2).permute(2, 0, 1, 3), state.flatten(1, 2)


def transition(chunks: Chunks) -> Tensor:
    """Returns the map S -> carrying S + update from the state before each row to the state after it: update and
    carrying concatenated, [batch, value_heads, key_dim, value_dim + key_dim]."""
    value_dim, key_dim = chunks.values.shape[-1], chunks.writing.shape[-1]
    # additional columns of the state, which get no values and start as the identity, end as `carrying`
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
    # unbound, not indexed, since the backward of each index fills a whole row with zeros
    steps = (part.unbind(3) for part in (chunks.values, chunks.erasing, chunks.writing, chunks.decay))
    for values, erasing, writing, decay in zip(*steps, strict=True):
        correction = values - erasing @ state
        states.append(state)
        corrections.append(correction)
        state = decay * state + writing.mT @ correction
    return torch.stack(states, 3), torch.stack(corrections, 3), state


class Decays(NamedTuple):
    """Products of decays over spans of tokens, by chunk; 0 across the start of a document."""

    between: Tensor
    """[..., chunk, chunk]: share of the contribution of token j that is left at token i."""
    from_start: Tensor
    """[..., chunk]: share of the state before the chunk that is left at each token."""


def chunk_decays(log_decay: Tensor, document_starts: Tensor | None, seq: int) -> Decays:
    """Computes the decays of every chunk from log decays, [batch, key_heads, shared, chunks, chunk] as of `by_chunk`,
    and document starts as in `delta_rule`; `seq` is the number of tokens without padding."""
    chunk = log_decay.shape[-1]
    spans, from_start = _sums(log_decay)
    order = torch.ones(chunk, chunk, dtype=torch.bool, device=log_decay.device).tril()
    if document_starts is not None:
        seen, sees_start = _inside_documents(document_starts.to(log_decay.device), seq, chunk)
        order = order & seen
        from_start = from_start.masked_fill(~sees_start, -math.inf)
    # masked before the exponential, so that both value and gradient are 0
    return Decays(spans.masked_fill(~order, -math.inf).exp(), from_start.exp())


def by_chunk(part: Tensor, key_heads: int, chunk: int) -> Tensor:
    """Rearranges [seq, batch, heads, ...] as [batch, key_heads, shared, chunks, chunk, ...], in at least float32.

    Pads the row to whole chunks by tokens that do not change states, with keys, steps and log decays of 0.
    """
    part = widened(part)
    missing = -len(part) % chunk
    part = functional.pad(part, (0, 0) * (part.dim() - 1) + (0, missing))
    part = torch.unflatten(torch.unflatten(part, 0, (-1, chunk)), 3, (key_heads, -1))
    return part.permute(2, 3, 4, 0, 1, *range(5, part.dim()))


def _sums(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Sums log decays after token j up to i, [..., chunk, chunk], and from the start up to i, [..., chunk]."""
    # A span is the difference of two sums. In float32, a strong decay early in the chunk, even in another document,
    # would cost the bits of weak decays after it. Summed by a matrix product, since torch refuses cumsum on a GPU in
    # deterministic runs.
    size = log_decay.shape[-1]
    sums = log_decay.double() @ torch.ones(size, size, dtype=torch.float64, device=log_decay.device).triu()
    spans = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    return spans.to(log_decay.dtype), sums.to(log_decay.dtype)


def _inside_documents(document_starts: Tensor, seq: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Says which pairs of tokens of a chunk are in the same document, [batch, 1, 1, chunks, chunk, chunk] bool, and
    which tokens belong to a document that starts before the chunk, [batch, 1, 1, chunks, chunk]."""
    # padding continues the last document
    missing = -seq % chunk
    starts = torch.cat((document_starts, document_starts[:, -1:].expand(-1, missing)), dim=1)
    starts = torch.unflatten(starts, 1, (-1, chunk))
    positions = torch.arange(seq + missing, device=starts.device).view(-1, chunk)
    same = starts.unsqueeze(-1) <= positions.unsqueeze(-2)
    return same[:, None, None], (starts < positions[:, :1])[:, None, None]
