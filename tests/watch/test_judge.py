"""Which rank is lost, judged from looks that a test makes up: no process, no clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtrain.base.heartbeat import Beat, Phase
from mtrain.watch.judge import Judge, Limits, Loss, Lost, Seen
from mtrain.watch.node import ProcessState

LIMITS = Limits(step_s=10, start_s=100, save_s=50)
RUNS, STOPPED, DEBUGGED = ProcessState("R", 1.0, 0, 0), ProcessState("T", 1.0, 0, 0), ProcessState("t", 1.0, 7, 0)


def at(rank: int, phase: Phase, step: int = 5, is_waiting: bool = False, calls: int = 7) -> Beat:
    call = f"all-reduce {calls}" if is_waiting else None
    return Beat(rank, 100 + rank, step, phase, 0.0, 0.0, start=1, call=call, calls=calls)


class Story:
    """A sequence of looks, a second apart."""

    def __init__(self, beats: dict[int, Beat] | None = None) -> None:
        self.beats = beats or {}
        self.judge = Judge(LIMITS, 2.0, lambda: self.beats)
        self.now = 0.0
        self.judge.look(0.0, [living(at(rank, Phase.DATA, step=1), 0.0) for rank in range(2)], 2)

    def ends_after(self, *ranks: Seen, lives: bool = True, most_s: int = 400) -> tuple[int, Loss]:
        """Repeats the given looks until a rank is judged lost; returns the seconds and the loss."""
        for second in range(most_s):
            self.now += 1
            seen = [living(one.state, self.now, one.process) if lives else one for one in ranks]
            if (loss := self.judge.look(self.now, seen, len(ranks))) is not None:
                return second, loss
        raise AssertionError("nobody is lost")


def living(state: Beat, now: float, process: ProcessState | None = RUNS) -> Seen:
    """Builds a rank whose interpreter runs, but which makes no progress."""
    return Seen(replace(state, written_s=now), process)


def seen(*states: Beat, process: ProcessState = RUNS) -> list[Seen]:
    return [Seen(state, process) for state in states]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (at(0, Phase.FORWARD_BACKWARD, is_waiting=True), at(1, Phase.DATA)),
        (at(0, Phase.DATA, step=6), at(1, Phase.SAVE, step=5)),
        (at(0, Phase.UPDATE, is_waiting=True), at(1, Phase.UPDATE)),
        (at(0, Phase.UPDATE, is_waiting=True, calls=9), at(1, Phase.UPDATE, is_waiting=True, calls=8)),
    ],
    ids=["phase", "step", "who waits", "the earlier collective"],
)
def test_the_rank_that_is_behind_is_lost_whoever_notices(first: Beat, second: Beat) -> None:
    seconds, loss = Story().ends_after(*seen(first, second))
    assert (loss.rank, loss.how) == (1, Lost.STUCK)
    assert seconds >= (LIMITS.save_s if second.phase == Phase.SAVE else LIMITS.step_s)


@pytest.mark.parametrize(
    ("phase", "step", "limit_s"),
    [
        (Phase.BUILD, 0, LIMITS.start_s),
        (Phase.FORWARD_BACKWARD, 1, LIMITS.start_s),
        (Phase.FORWARD_BACKWARD, 2, LIMITS.step_s),
        (Phase.VALIDATION, 2, LIMITS.step_s),
        (Phase.SAVE, 2, LIMITS.save_s),
    ],
)
def test_each_phase_has_its_time(phase: Phase, step: int, limit_s: float) -> None:
    seconds, _ = Story().ends_after(*seen(at(0, phase, step), at(1, phase, step)))
    assert limit_s <= seconds <= limit_s + 2


def test_an_export_may_take_any_time_but_not_a_stopped_one() -> None:
    with pytest.raises(AssertionError, match="nobody is lost"):
        Story().ends_after(*seen(at(0, Phase.EXPORT)))
    seconds, loss = Story().ends_after(*seen(at(0, Phase.EXPORT), process=STOPPED), lives=False)
    assert (loss.rank, loss.how) == (0, Lost.STOPPED)
    assert seconds <= LIMITS.step_s + 2


def test_a_stopped_rank_is_lost_in_any_phase_after_the_timeout() -> None:
    story, working = Story(), at(0, Phase.BUILD, 0)
    for second in range(1, 30):
        ranks = [living(replace(working, changed_s=second), second), Seen(at(1, Phase.BUILD, 0), STOPPED)]
        if (loss := story.judge.look(second, ranks, 2)) is not None:
            break
    assert loss is not None
    assert (loss.rank, loss.how) == (1, Lost.STOPPED)
    assert LIMITS.step_s <= second <= LIMITS.step_s + 3


def test_slow_ranks_that_get_on_are_left_alone() -> None:
    story = Story()
    for second in range(1, 500):
        microbatch = at(0, Phase.FORWARD_BACKWARD), at(1, Phase.FORWARD_BACKWARD, is_waiting=True)
        ranks = [living(replace(state, changed_s=second // 9), second) for state in microbatch]
        assert story.judge.look(second, ranks, 2) is None


def test_time_in_which_the_watchdog_did_not_run_does_not_count() -> None:
    story, ranks = Story(), seen(at(0, Phase.UPDATE), at(1, Phase.UPDATE))
    for minute in range(1, 4):
        assert story.judge.look(60.0 * minute, ranks, 2) is None, "a node that was suspended"


def test_nobody_is_ended_under_a_debugger() -> None:
    with pytest.raises(AssertionError, match="nobody is lost"):
        Story().ends_after(*seen(at(0, Phase.UPDATE), at(1, Phase.UPDATE), process=DEBUGGED), lives=False)


def beat(rank: int, phase: Phase, changed_s: float = 1.0, left_with: str | None = None) -> Beat:
    call = "all-reduce 3" if phase == Phase.UPDATE else None
    return Beat(rank, 1, 5, phase, 0.0, 0.0, left_with, start=1, changed_s=changed_s, call=call)


def test_a_rank_of_another_node_is_named() -> None:
    story = Story({2: beat(2, Phase.UPDATE), 3: beat(3, Phase.DATA)})
    _, loss = story.ends_after(*seen(at(0, Phase.UPDATE, is_waiting=True), at(1, Phase.UPDATE, is_waiting=True)))
    assert (loss.rank, loss.is_here) == (3, False)


def test_this_node_waits_as_long_as_another_one_gets_on() -> None:
    story, ranks = Story(), seen(at(0, Phase.UPDATE, is_waiting=True), at(1, Phase.UPDATE, is_waiting=True))
    for second in range(1, 300):
        story.beats = {2: beat(2, Phase.DATA, changed_s=second), 3: beat(3, Phase.UPDATE)}
        assert story.judge.look(second, [living(one.state, second) for one in ranks], 2) is None


def test_a_rank_that_never_begins_is_lost() -> None:
    judge = Judge(LIMITS, 2.0)
    found = [judge.look(float(n), [living(at(0, Phase.START, 0), float(n))], 2) for n in range(14)]
    assert found[9] is None
    assert found[13] is not None
    assert found[13].how is Lost.ABSENT
