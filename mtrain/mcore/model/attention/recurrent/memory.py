"""States of earlier tokens, so that a further token costs one step of the recurrence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrain.mcore.model.attention.cache import CachedPass


@dataclass(frozen=True)
class Places:
    """Where the tokens of a pass are if each sequence has a row of its own, of which tokens are the last."""

    sequences: Tensor
    """[rows] sequence of each row."""
    row: Tensor
    """[tokens] row of each token."""
    place: Tensor
    """[tokens] its index in the row."""
    length: int
    """Length of the rows."""

    def as_rows(self, tokens: Tensor) -> Tensor:
        """[tokens, 1, ...] -> [length, rows, ...]. Zeros fill the rows in front, as what is before a sequence."""
        rows = tokens.new_zeros(self.length, len(self.sequences), *tokens.shape[2:])
        rows[self.place, self.row] = tokens[:, 0]
        return rows

    def as_tokens(self, rows: Tensor) -> Tensor:
        """[length, rows, ...] -> [tokens, 1, ...]."""
        return rows[self.place, self.row].unsqueeze(1)


class Memory:
    """The convolution's last inputs and the state of each sequence, of one layer on this rank."""

    def __init__(self, reading: CachedPass) -> None:
        self._reading = reading
        self._window: Tensor | None = None
        """[kernel - 1, sequences, channels]"""
        self._state: Tensor | None = None
        """[sequences, value_heads, key_dim, value_dim]"""

    def places(self) -> Places:
        """Returns the places of the tokens of this pass."""
        reading = self._reading
        sequences, row, counts = torch.unique(reading.sequences, return_inverse=True, return_counts=True)
        if not reading.of_prompts:  # one token each; those that only pad a row share one
            return Places(sequences, row, torch.zeros_like(row), 1)
        length = int(counts.max())
        return Places(sequences, row, length - counts[row] + reading.positions, length)

    def window(self, places: Places) -> Tensor | None:
        """Returns the inputs before the tokens, [kernel - 1, rows, channels]; None: sequences begin here."""
        if self._reading.of_prompts or self._window is None:
            return None
        return self._window[:, places.sequences]

    def state(self, places: Places) -> Tensor | None:
        """Returns the states before the tokens, [rows, value_heads, key_dim, value_dim]; None: sequences begin here."""
        if self._reading.of_prompts or self._state is None:
            return None
        return self._state[places.sequences]

    def keep(self, places: Places, window: Tensor, state: Tensor) -> None:
        """Keeps what is after the tokens, in the shapes of `window` and `state`."""
        count = self._reading.capacity[0]
        if self._window is None or self._state is None:
            self._window = window.new_zeros(len(window), count, *window.shape[2:])
            self._state = state.new_zeros(count, *state.shape[1:])
        self._window[:, places.sequences] = window
        self._state[places.sequences] = state
