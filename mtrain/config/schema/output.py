"""What ends a model: logits of the vocabulary, or a head that judges sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias


@dataclass(frozen=True)
class TokenOutput:
    """Output of a model that predicts tokens."""

    rows: int
    """Number of outputs a token, without padding: the vocabulary."""
    is_tied: bool
    """Whether the output layer shares the table of the embeddings."""
    head_rows: ClassVar[int] = 0
    is_new: ClassVar[bool] = False

    @property
    def has_table(self) -> bool:
        """Says whether the output layer has a table of its own."""
        return not self.is_tied


@dataclass(frozen=True)
class HeadOutput:
    """Output of a model that judges sequences: one matrix without a bias, in the place of the output layer, which every
    rank of TP holds whole."""

    rows: int
    """Number of rows of the matrix, which is that of labels."""
    is_tied: ClassVar[bool] = False
    has_table: ClassVar[bool] = False
    is_new: ClassVar[bool] = True
    """Whether a language model has no such weights: they begin at random, and learn whole next to adapters."""

    @property
    def head_rows(self) -> int:
        """Returns the number of rows that every rank of TP holds whole; 0 where the model predicts tokens."""
        return self.rows

    def __str__(self) -> str:
        """Returns the key that asks for the head, for messages."""
        return f"model.num_labels={self.rows}"


AnyOutput: TypeAlias = TokenOutput | HeadOutput
"""Output of a model; code that depends on it matches on these classes, or asks them."""
