"""Tokens of the passes of generation, in which layers keep what they need of earlier tokens.

A pass of generation reads one row of tokens, each of some sequence at some position: whole prompts one after the other
(as documents), or one further token of each sequence. So sequences of any lengths go together without padding, and the
row divides over sequence-parallel ranks like any other.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch


class CachedPass:
    """The tokens that a pass reads, for all layers of a rank."""

    def __init__(self, num_sequences: int, length: int, device: torch.device) -> None:
        """
        Args:
            num_sequences: Largest number of sequences; a further one takes tokens that only pad a row.
            length: Length of the longest sequence, prompt and answer.
            device: Device of the model.
        """
        self.capacity = (num_sequences + 1, length)
        self.device = device
        self.of_prompts = True
        self.num_keys = 0
        self.sequences = self.positions = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def filler(self) -> int:
        """Returns the sequence of tokens that only pad a row."""
        return self.capacity[0] - 1

    def read(self, sequences: Sequence[int], positions: Sequence[int], of_prompts: bool) -> None:
        """Sets the tokens of the next pass.

        Args:
            sequences: Sequence of each token.
            positions: Position of each token in its sequence.
            of_prompts: Whether sequences begin here, each in one run from position 0; else each token continues one.
        """
        self.sequences = torch.tensor(sequences, dtype=torch.int64, device=self.device)
        self.positions = torch.tensor(positions, dtype=torch.int64, device=self.device)
        self.num_keys, self.of_prompts = max(positions) + 1, of_prompts


class Remembering(ABC):
    """A module that keeps what it has read of a sequence during generation."""

    @abstractmethod
    def remember(self, reading: CachedPass | None) -> None:
        """Starts with an empty cache for these passes; None: keeps nothing from here on."""


@contextlib.contextmanager
def remembering(modules: Iterable[Remembering], reading: CachedPass) -> Iterator[None]:
    """Makes all these modules of a rank keep what they read inside the block."""
    layers = list(modules)
    try:
        for layer in layers:
            layer.remember(reading)
        yield
    finally:
        for layer in layers:
            layer.remember(None)
