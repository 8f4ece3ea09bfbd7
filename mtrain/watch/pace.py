"""Detection of slow ranks, by the time in which each works and does not wait for others.

Ranks of one pipeline stage do the same work, so they are compared with each other; a step takes as long on all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple


class OwnTime(NamedTuple):
    """Working time of one rank over a window of steps."""

    stage: int
    """Pipeline stage of the rank."""
    seconds: float
    """Mean time per step, without waiting for other ranks."""


def slow_ranks(window: Mapping[int, OwnTime], percent: float) -> dict[int, float]:
    """Returns the slow ranks: rank -> its time divided by the median of its stage.

    Args:
        window: Times of all ranks over the same steps.
        percent: Percentage above the median from which a rank is slow.
    """
    found: dict[int, float] = {}
    for stage in {one.stage for one in window.values()}:
        times = {rank: one.seconds for rank, one in window.items() if one.stage == stage}
        usual = statistics.median_low(times.values())  # of two ranks the faster one is the reference
        if usual > 0:
            found |= {rank: own / usual for rank, own in times.items() if own > usual * (1 + percent / 100)}
    return found


class PaceJudge:
    """Judge over several windows: a rank is slow if it was slow in enough consecutive ones."""

    def __init__(self, percent: float, num_windows: int) -> None:
        """
        Args:
            percent: Percentage above the median from which a rank is slow in a window.
            num_windows: Number of consecutive windows.
        """
        self._percent, self._num_windows = percent, num_windows
        self._in_a_row: dict[int, int] = {}

    def add(self, window: Mapping[int, OwnTime]) -> dict[int, float]:
        """Returns the ranks that are slow by now, with the last window's ratio to the median."""
        slow = slow_ranks(window, self._percent)
        self._in_a_row = {rank: self._in_a_row.get(rank, 0) + 1 for rank in slow}
        return {rank: ratio for rank, ratio in slow.items() if self._in_a_row[rank] >= self._num_windows}
