"""What the loader hands to the training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MtpTargets:
    """What one depth of multi-token prediction sees and has to say."""

    tokens: Tensor
    """[batch, seq] int64: the token that lies so far ahead in the document; 0 where there is none."""
    labels: Tensor
    """[batch, seq] int64: the token behind it; 0 where there is none."""
    is_padding: Tensor | None
    """[batch, seq] bool: positions without a token so far ahead; routers of experts do not count them. None where
    nobody asks."""

    def each(self, change: Callable[[Tensor], Tensor]) -> MtpTargets:
        """The same change to every field."""
        is_padding = None if self.is_padding is None else change(self.is_padding)
        return MtpTargets(change(self.tokens), change(self.labels), is_padding)


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
    denominator_weights: dict[str, Tensor]
    """Loss term -> [batch, seq] float64: each token's share of the term's denominator."""
    document_starts: Tensor | None
    """[batch, seq] int32, on the CPU: index in the row of the first token of the token's own document; attention does
    not reach below it. None: each row is one document (causal attention over the row)."""
    is_padding: Tensor | None
    """[batch, seq] bool: positions that hold no text, whatever the loss mask says of the others; routers of experts do
    not count them. None where nobody asks."""
    mtp: tuple[MtpTargets, ...] = ()
    """By depth, from 1, where several tokens are predicted."""
    num_padding_tokens: int = 0
    """Positions that hold no text, as the loader counts them; ranks that receive their rows have 0."""
    num_loss_tokens: int = 0
    """Positions that the main term counts; likewise."""
