"""Keys and values of tokens that were read before, so that a further token costs one row of a forward pass.

A pass of generation reads one row of tokens, each of some sequence at some position: whole prompts one behind the other
(as documents), or one further token of each sequence. So sequences of any lengths go together without padding, and the
row divides over sequence-parallel ranks like any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor


class KeyValueCache:
    """What one attention layer, on this rank, keeps of each sequence; all layers of a rank are given together what the
    next pass reads, by `CachedPass`."""

    def __init__(self, reading: CachedPass) -> None:
        self._reading = reading
        self._rows: Tensor | None = None
        """[sequences, length, ...]"""

    def extended(self, rows: Tensor) -> Tensor:
        """Keeps what the tokens of this pass add, and returns what its queries may see.

        Args:
            rows: [tokens, 1, ...].

        Returns:
            A pass over prompts: `rows`. Else [keys, tokens, ...], for each token all that its sequence has so far and
            something else behind it, which `CachedPass.visible` hides.
        """
        reading = self._reading
        if self._rows is None:
            self._rows = rows.new_zeros((*reading.capacity, *rows.shape[2:]))
        self._rows[reading.sequences, reading.positions] = rows[:, 0]
        if reading.of_prompts:
            return rows
        return self._rows[:, : reading.num_keys].index_select(0, reading.sequences).transpose(0, 1)

    def visible(self, window: int | None) -> Tensor | None:
        """As `CachedPass.visible`; None in a pass over prompts, whose tokens see those of their own document."""
        return None if self._reading.of_prompts else self._reading.visible(window)


class CachedPass:
    """Which tokens the pass reads, for all layers of a rank."""

    def __init__(self, num_sequences: int, length: int, device: torch.device) -> None:
        """Args:
        num_sequences: Places for sequences; one more is there for tokens that only fill up a row.
        length: Of the longest sequence, prompt and answer.
        device: Of the model.
        """
        self.capacity = (num_sequences + 1, length)
        self.device = device
        self.of_prompts = True
        self.num_keys = 0
        self.sequences = self.positions = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def filler(self) -> int:
        """The sequence of tokens that only fill up a row."""
        return self.capacity[0] - 1

    def read(self, sequences: Sequence[int], positions: Sequence[int], of_prompts: bool) -> None:
        """Says what the next pass reads.

        Args:
            sequences: Of each token.
            positions: Of each token in its sequence.
            of_prompts: Whether sequences begin here, each in one run from position 0; else each token continues one.
        """
        self.sequences = torch.tensor(sequences, dtype=torch.int64, device=self.device)
        self.positions = torch.tensor(positions, dtype=torch.int64, device=self.device)
        self.num_keys, self.of_prompts = max(positions) + 1, of_prompts

    def visible(self, window: int | None) -> Tensor:
        """[tokens, 1, 1, keys] bool: the keys that each token sees.

        Args:
            window: Keys that a query sees at most, its own among them; None: all before it.
        """
        distance = self.positions[:, None] - torch.arange(self.num_keys, device=self.device)[None]
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return seen[:, None, None]


class Remembering:
    """A module that keeps what it has read of a sequence while text is generated."""

    def remember(self, reading: CachedPass | None) -> None:
        """Begins anew, for what these passes read; None: keeps nothing from here on."""
        raise NotImplementedError


@contextlib.contextmanager
def remembering(modules: Iterable[Remembering], reading: CachedPass) -> Iterator[None]:
    """Inside the block every layer keeps what it has read.

    Args:
        modules: All of this rank.
        reading: What each pass reads.
    """
    held = list(modules)
    try:
        for each in held:
            each.remember(reading)
        yield
    finally:
        for each in held:
            each.remember(None)
