"""A clock that stops while its process is suspended."""

import time
from collections.abc import Callable


class AwakeClock:
    """Counts the seconds in which this process was not suspended; call it often to read it."""

    def __init__(self, longest_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts at 0; a gap above `longest_gap_s` between two readings means that the process was suspended."""
        self._longest_gap_s, self._clock = longest_gap_s, clock
        self._read_s, self._awake_s = clock(), 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._awake_s += min(now - self._read_s, self._longest_gap_s)
        self._read_s = now
        return self._awake_s
