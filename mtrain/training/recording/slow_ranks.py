"""Detection of slow ranks, by the time in which each works and does not wait for others.

Each rank reports its own time by its heartbeat, and the first rank compares those of one pipeline stage, which do the
same work; a step takes as long on all of them.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from mtrain.base.heartbeat import Heartbeat
from mtrain.config.schema.run import WatchSection
from mtrain.core.ranks.groups import Groups
from mtrain.report.metrics.record import StepRecord
from mtrain.training.recording.life import Life

_log = logging.getLogger(__name__)


class OwnTime(NamedTuple):
    """Working time of one rank over a window of steps."""

    stage: int
    """Pipeline stage of the rank."""
    seconds: float
    """Mean time per step, without waiting for other ranks."""


def slow_ranks(window: Mapping[int, OwnTime], percent: float) -> dict[int, float]:
    """Returns the slow ranks, `percent` above the median of their stage: rank -> its time divided by the median."""
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
        self._percent, self._num_windows = percent, num_windows
        self._in_a_row: dict[int, int] = {}

    def add(self, window: Mapping[int, OwnTime]) -> dict[int, float]:
        """Returns the ranks that are slow by now, with the last window's ratio to the median."""
        slow = slow_ranks(window, self._percent)
        self._in_a_row = {rank: self._in_a_row.get(rank, 0) + 1 for rank in slow}
        return {rank: ratio for rank, ratio in slow.items() if self._in_a_row[rank] >= self._num_windows}


class SlowRanks:
    """Detector of slow ranks, on one rank; without collectives."""

    def __init__(self, watch: WatchSection, groups: Groups, heartbeat: Heartbeat, life: Life) -> None:
        """Begins without a known slow rank."""
        self._watch, self._groups, self._heartbeat, self._life = watch, groups, heartbeat, life
        self._judge = PaceJudge(watch.slow_rank_percent, watch.slow_rank_windows)
        self._own_s, self._num_steps, self._window = 0.0, 0, 0
        self._judged = 0
        self._slow: dict[int, float] = {}
        self._reported: set[int] = set()

    def noted(self, record: StepRecord, waited_s: float) -> StepRecord:
        """Counts a step of this rank, which waited `waited_s` for others, and names a slow rank in its record, if
        any."""
        record = replace(record, waited_seconds=waited_s)
        if not self._watch.slow_rank_percent:
            return record
        self._own_s += record.seconds - waited_s
        self._num_steps += 1
        if record.step % self._watch.window_steps == 0:
            self._window = record.step
            self._heartbeat.note_pace(record.step, self._groups.pp_rank, self._own_s / self._num_steps)
            self._own_s, self._num_steps = 0.0, 0
        slow = self._slow
        if not slow:
            return record
        rank = max(slow, key=slow.__getitem__)
        return replace(record, slow_rank=rank, slow_rank_ratio=slow[rank])

    def look(self) -> None:
        """Compares the ranks once all have reported the latest window. In the heartbeat's thread of the first rank."""
        window = self._window
        if self._groups.rank != 0 or window == self._judged:
            return
        beats = self._heartbeat.of_all()
        if any(beat is None or beat.pace_step != window for beat in beats):
            return
        self._judged = window
        own = {beat.rank: OwnTime(beat.stage, beat.pace_s) for beat in beats if beat is not None}
        slow = self._judge.add(own)
        for rank in slow.keys() - self._reported:
            self._reported.add(rank)  # once per start; records continue to name it
            steps = self._watch.slow_rank_windows * self._watch.window_steps
            text = (
                f"rank {rank} is slow: its own work took {slow[rank]:.2f} times the median of its pipeline stage in "
                f"the last {steps} steps, and all ranks wait for it"
            )
            _log.info(f"warning: {text}")
            self._life.alarmed(window, text, {"slow_rank": rank, "ratio": round(slow[rank], 3)})
        self._slow = slow
