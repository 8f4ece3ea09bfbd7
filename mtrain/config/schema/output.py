"""Output of a model: logits of the vocabulary, or a head that scores sequences."""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias


@dataclass(frozen=True)
class TokenOutput:
    """Output of a model that predicts tokens."""

    rows: int
    """Size of the vocabulary, without padding."""
    is_tied: bool
    """Whether the output layer shares the embedding table."""
    head_rows: ClassVar[int] = 0
    is_new: ClassVar[bool] = False

    @property
    def has_table(self) -> bool:
        """Whether the output layer has its own table."""
        return not self.is_tied


@dataclass(frozen=True)
class HeadOutput:
    """Output of a model that scores sequences: a matrix without bias instead of the output layer, whole on every TP
    rank."""

    rows: int
    """Number of labels."""
    is_tied: ClassVar[bool] = False
    has_table: ClassVar[bool] = False
    is_new: ClassVar[bool] = True
    """Whether language models lack these weights, which then start random and are fully trained alongside adapters."""

    @property
    def head_rows(self) -> int:
        """Rows that every TP rank holds whole; 0 if the model predicts tokens."""
        return self.rows

    def __str__(self) -> str:
        return f"model.num_labels={self.rows}"


AnyOutput: TypeAlias = TokenOutput | HeadOutput
"""Output of a model; code that depends on it matches on these classes or reads their properties."""
