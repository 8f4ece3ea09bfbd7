"""State of a run, from what its ranks have left in the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mtrain.base.heartbeat import Beat, Phase
from mtrain.runs.events import ENDS, EventKind, RunEvent

SILENT_AFTER_S = 15.0
"""Seconds after which a rank is silent: it beats every second; a shared file system shows it some seconds later."""
_RANKS_A_SECOND = 100
"""Scale of that time for large runs: each of n ranks beats every n / 500 seconds, and five missed beats make it
silent."""
_CLOCKS_S = 5.0
"""Largest difference between the clocks of nodes, in seconds."""


class RunState(StrEnum):
    STARTING = "starting"
    """The ranks build model and data."""
    RUNNING = "running"
    SAVING = "saving"
    """The ranks wait for a checkpoint, or the run writes its last one."""
    STOPPED = "stopped for requeue"
    FINISHED = "finished"
    FAILED = "failed"
    SILENT = "silent"
    """The run has not ended, but none of its ranks shows a sign of life."""
    UNKNOWN = "not started"
    """The folder exists, but nothing shows a start."""


@dataclass(frozen=True)
class Standing:
    """State of a run, with its time and reason."""

    state: RunState
    since_s: float | None
    """Unix time since which it holds; None if unknown."""
    reason: str = ""
    """Why the run failed or stopped."""
    silent_ranks: tuple[int, ...] = ()
    """Ranks that show no sign of life while others do, or that have not begun."""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)


@dataclass(frozen=True)
class Signs:
    """Contents of a run folder that determine the state, besides numbers."""

    events: Sequence[RunEvent]
    """Events by time."""
    beats: Sequence[Beat]
    """Latest beat of each rank that has one, of any start."""
    world_size: int
    """World size of the latest start; 0 if unknown."""
    steps: int
    """Steps done."""
    num_steps: int | None
    """Steps to do; None if unknown."""
    requeue: str | None
    """Text of the requeue marker; None without one."""
    written_s: float | None
    """Unix time of the last write to metrics.jsonl; None without one."""


def latest_start(events: Sequence[RunEvent]) -> Sequence[RunEvent]:
    """Returns the events of the latest start, from its start on."""
    places = [place for place, event in enumerate(events) if event.kind is EventKind.START]
    return events[places[-1] :] if places else ()


def standing(signs: Signs, now_s: float) -> Standing:
    """Determines the state at the Unix time `now_s`."""
    events = latest_start(signs.events)
    since_s = events[0].time_s - _CLOCKS_S if events else 0.0
    beats = [beat for beat in signs.beats if beat.written_s >= since_s]
    if any(event.kind in ENDS for event in events):
        return _ended(events, signs)
    if (left := _left_with_error(beats)) is not None:
        return left
    if not events and (old := _ended_without_events(signs, beats)) is not None:
        return old
    limit_s = max(SILENT_AFTER_S, signs.world_size / _RANKS_A_SECOND)
    alive = [beat for beat in beats if now_s - beat.written_s <= limit_s and beat.left_with is None]
    if not alive:
        return _without_life(events, beats, signs, now_s - limit_s)
    silent = sorted(
        set(range(signs.world_size)) - {beat.rank for beat in alive} - {b.rank for b in beats if b.left_with}
    )
    if events and now_s - events[0].time_s <= limit_s:
        silent = []  # they may just be starting
    last = max(alive, key=lambda beat: beat.progress)
    if last.phase in (Phase.START, Phase.BUILD):
        return Standing(RunState.STARTING, last.since_s, silent_ranks=tuple(silent))
    is_saving = last.phase in (Phase.SAVE, Phase.EXPORT)
    return Standing(RunState.SAVING if is_saving else RunState.RUNNING, last.since_s, silent_ranks=tuple(silent))


def _ended(events: Sequence[RunEvent], signs: Signs) -> Standing:
    ends = [event for event in events if event.kind in ENDS]
    failures = [event for event in ends if event.kind is EventKind.FAILURE]
    if failures:
        return Standing(RunState.FAILED, ends[-1].time_s, _reason(failures))
    last = ends[-1]
    if last.kind is EventKind.STOP:
        gone = "" if signs.requeue is not None else "; the marker REQUEUE has been removed"
        return Standing(RunState.STOPPED, last.time_s, last.text + gone)
    return Standing(RunState.FINISHED, last.time_s)


def _reason(failures: Sequence[RunEvent]) -> str:
    """Describes the first failure that is not just the loss of another rank."""
    own = [event for event in failures if not event.text.startswith("RankLostError")]
    first = (own or failures)[0]
    return f"rank {first.rank}: {first.text}"


def _left_with_error(beats: Sequence[Beat]) -> Standing | None:
    """Returns the state if ranks left by an error that no event records; else None."""
    left = [beat for beat in beats if beat.left_with not in (None, "done")]
    own = [beat for beat in left if beat.left_with != "RankLostError"] or left
    if not own:
        return None
    first = min(own, key=lambda beat: beat.written_s)
    return Standing(RunState.FAILED, first.written_s, f"rank {first.rank}: {first.left_with} in {first.place}")


def _ended_without_events(signs: Signs, beats: Sequence[Beat]) -> Standing | None:
    """Returns the state of a run of a version without events, if it has ended; else None."""
    if signs.requeue is not None:
        return Standing(RunState.STOPPED, signs.written_s, signs.requeue)
    is_done = signs.num_steps is not None and signs.steps >= signs.num_steps
    if is_done and all(beat.left_with == "done" for beat in beats):
        return Standing(RunState.FINISHED, signs.written_s)
    return None


def _without_life(events: Sequence[RunEvent], beats: Sequence[Beat], signs: Signs, limit_s: float) -> Standing:
    """Returns the state when no rank beats; signs of life before the Unix time `limit_s` are too old."""
    times = [*(beat.written_s for beat in beats), *(event.time_s for event in events)]
    if not events and signs.written_s is not None:
        times.append(signs.written_s)
    if not times:
        return Standing(RunState.UNKNOWN, None)
    if max(times) <= limit_s:
        return Standing(RunState.SILENT, max(times))
    return Standing(RunState.RUNNING if signs.steps and not events else RunState.STARTING, max(times))
