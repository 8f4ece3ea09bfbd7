"""Detection of slow ranks: each reports its own time by its heartbeat, and the first rank compares them."""

from __future__ import annotations

from dataclasses import replace

from mtrain.base.heartbeat import Heartbeat
from mtrain.config.schema.run import WatchSection
from mtrain.mcore.distributed.groups import Groups
from mtrain.metrics.record import StepRecord
from mtrain.training.recording.life import Life
from mtrain.training.resume import say
from mtrain.watch.pace import OwnTime, PaceJudge


class SlowRanks:
    """Detector of slow ranks, on one rank; without collectives, and no rank waits for it."""

    def __init__(self, watch: WatchSection, groups: Groups, heartbeat: Heartbeat, life: Life) -> None:
        """Begins without a known slow rank.

        Args:
            watch: Section of the configuration that says which ranks are slow.
            groups: Process groups.
            heartbeat: Heartbeat by which the ranks report their times.
            life: Events of the run, which get the alarm.
        """
        self._watch, self._groups, self._heartbeat, self._life = watch, groups, heartbeat, life
        self._judge = PaceJudge(watch.slow_rank_percent, watch.slow_rank_windows)
        self._own_s, self._num_steps, self._window = 0.0, 0, 0
        self._judged = 0
        self._slow: dict[int, float] = {}
        self._reported: set[int] = set()

    def noted(self, record: StepRecord, waited_s: float) -> StepRecord:
        """Counts a step of this rank, and names a slow rank in its record if there is one. In the training thread.

        Args:
            record: Record of the step.
            waited_s: Time in which this rank waited for others, in seconds.
        """
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
            say(f"warning: {text}")
            self._life.alarmed(window, text, {"slow_rank": rank, "ratio": round(slow[rank], 3)})
        self._slow = slow
