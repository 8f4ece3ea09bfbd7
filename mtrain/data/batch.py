"""What the loader hands to the training step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Microbatch:
    """Samples of one forward pass, one row a sample; full rows, before they are cut for context parallelism."""

    tokens: Tensor
    """[batch, seq] int64."""
    labels: Tensor
    """[batch, seq] int64, already shifted: the token to predict at each position; 0 where there is none."""
    positions: Tensor
    """[batch, seq] int64: position inside the document, for the rotary embedding."""
    weights: dict[str, Tensor]
    """Loss term -> [batch, seq] float32: factor of each token's loss."""
    shares: dict[str, Tensor]
    """Loss term -> [batch, seq] float64: each token's share of the term's denominator."""
    document_starts: Tensor | None
    """[batch, seq] int32, on the CPU: index in the row of the first token of the token's own document; attention does
    not reach below it. None: each row is one document (causal attention over the row)."""
    is_padding: Tensor | None
    """[batch, seq] bool: positions that hold no text, whatever the loss mask says of the others; routers of experts do
    not count them. None where nobody asks."""
