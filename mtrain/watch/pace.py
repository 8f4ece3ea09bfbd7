"""Which rank is slower than the others, by the time in which it works and does not wait for them.

Ranks of one pipeline stage do the same work, so they are compared with each other; a step takes as long on all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple


class OwnTime(NamedTuple):
    """Of one rank over a window of steps."""

    stage: int
    """Of the pipeline."""
    seconds: float
    """A step's mean, without waiting for other ranks."""


def slow_ranks(window: Mapping[int, OwnTime], percent: float) -> dict[int, float]:
    """Rank -> how many times the median of its stage it took, where that is too much.

    Args:
        window: All ranks over the same steps.
        percent: A rank is slow where it takes so much more than the median.
    """
    found: dict[int, float] = {}
    for stage in {one.stage for one in window.values()}:
        times = {rank: one.seconds for rank, one in window.items() if one.stage == stage}
        usual = statistics.median_low(times.values())  # of two ranks the faster one
        if usual > 0:
            found |= {rank: own / usual for rank, own in times.items() if own > usual * (1 + percent / 100)}
    return found


class PaceJudge:
    """Remembers windows: a rank is slow that was so in several of them, one after the other."""

    def __init__(self, percent: float, num_windows: int) -> None:
        """
        Args:
            percent: As for `slow_ranks`.
            num_windows: So many in a row.
        """
        self._percent, self._num_windows = percent, num_windows
        self._in_a_row: dict[int, int] = {}

    def add(self, window: Mapping[int, OwnTime]) -> dict[int, float]:
        """The ranks that are slow by now, with the last window's ratio to the median."""
        slow = slow_ranks(window, self._percent)
        self._in_a_row = {rank: self._in_a_row.get(rank, 0) + 1 for rank in slow}
        return {rank: ratio for rank, ratio in slow.items() if self._in_a_row[rank] >= self._num_windows}
