"""The state of a run, read from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mtrain.base.heartbeat import Beat, Phase
from mtrain.report.monitor.status import RunState, Signs, standing
from mtrain.runs.events import EventKind, RunEvent

NOW = 1_000_000.0
START = RunEvent(kind=EventKind.START, step=0, time_s=NOW - 100)


def event(kind: EventKind, text: str = "", rank: int = 0, ago_s: float = 1) -> RunEvent:
    return RunEvent(kind=kind, step=4, time_s=NOW - ago_s, text=text, rank=rank)


def beat(rank: int = 0, phase: Phase = Phase.UPDATE, ago_s: float = 0.5, left_with: str | None = None) -> Beat:
    return Beat(rank, 1, 5, phase, NOW - 2, NOW - ago_s, left_with)


def signs(events: Sequence[RunEvent] = (START,), beats: Sequence[Beat] = ()) -> Signs:
    return Signs(events, beats, world_size=2, steps=4, num_steps=9, requeue=None, written_s=NOW - 1)


BOTH = (beat(0), beat(1))
LOST = "RankLostError: rank 0 lost the connection to another rank"


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (signs(beats=BOTH), RunState.RUNNING),
        (signs(beats=(beat(0, Phase.BUILD), beat(1, Phase.START))), RunState.STARTING),
        (signs(beats=(beat(0, Phase.SAVE), beat(1, Phase.UPDATE))), RunState.SAVING),
        (signs(beats=(beat(0, Phase.EXPORT),)), RunState.SAVING),
        (signs((replace(START, time_s=NOW - 1),)), RunState.STARTING),
        (signs(beats=(beat(0, ago_s=60), beat(1, ago_s=60))), RunState.SILENT),
        (signs(), RunState.SILENT),
        (signs((START, event(EventKind.STOP)), BOTH), RunState.STOPPED),
        (signs((START, event(EventKind.FINISH)), BOTH), RunState.FINISHED),
        (signs((START, event(EventKind.FAILURE)), BOTH), RunState.FAILED),
        (signs((START, event(EventKind.FAILURE), replace(START, time_s=NOW - 0.5)), BOTH), RunState.RUNNING),
        (signs(beats=(beat(0), beat(1, left_with="KeyError"))), RunState.FAILED),
        (signs((replace(START, time_s=NOW),), (beat(0, ago_s=50, left_with="KeyError"),)), RunState.STARTING),
        (signs(()), RunState.RUNNING),
        (replace(signs(()), written_s=NOW - 600), RunState.SILENT),
        (replace(signs(()), steps=9), RunState.FINISHED),
        (replace(signs(()), requeue="stopped"), RunState.STOPPED),
        (replace(signs(()), written_s=None), RunState.UNKNOWN),
    ],
)
def test_the_state_follows_from_the_latest_start(found: Signs, state: RunState) -> None:
    assert standing(found, NOW).state is state


def test_the_reason_of_a_failure_is_that_of_the_rank_that_failed_itself() -> None:
    events = (START, event(EventKind.FAILURE, LOST), event(EventKind.FAILURE, "DataError: no file", rank=1))
    assert standing(signs(events), NOW).reason == "rank 1: DataError: no file"
    assert standing(signs(events[:2]), NOW).reason == f"rank 0: {LOST}"
    beats = (beat(0, left_with="RankLostError"), beat(1, left_with="KeyError"))
    assert standing(signs(beats=beats), NOW).reason == "rank 1: KeyError in update of step 5"


def test_a_marker_that_was_removed_is_reported() -> None:
    found = signs((START, event(EventKind.STOP, "by a signal")))
    assert str(standing(replace(found, requeue="x"), NOW)) == "stopped for requeue: by a signal"
    assert str(standing(found, NOW)).endswith("by a signal; the REQUEUE marker has been removed")


def test_silent_ranks_are_named_while_others_beat() -> None:
    assert standing(signs(beats=(beat(0), beat(1, ago_s=60))), NOW).silent_ranks == (1,)
    assert standing(signs(beats=(beat(0),)), NOW).silent_ranks == (1,)
    assert standing(signs(beats=BOTH), NOW).silent_ranks == ()
    young = (replace(START, time_s=NOW - 1),)
    assert standing(signs(young, (beat(0),)), NOW).silent_ranks == (), "the other one may just be starting"
    assert standing(signs(beats=(beat(0), beat(1, ago_s=60, left_with="done"))), NOW).silent_ranks == ()


def test_ranks_of_a_large_run_may_beat_rarely() -> None:
    many = replace(signs(beats=(beat(0), beat(1, ago_s=60))), world_size=10_000)
    assert 1 not in standing(many, NOW).silent_ranks
    assert standing(replace(many, beats=(beat(0, ago_s=60),)), NOW).state is RunState.RUNNING
