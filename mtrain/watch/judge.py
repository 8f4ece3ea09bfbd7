"""Decides which rank is lost, from repeated looks at a node's ranks and, when these make no progress, at other nodes.

A training step ends on all ranks or on none, so a job hangs when none of its ranks makes progress. Then the others wait
for the rank at the earliest place. Time in which the watchdog itself did not run does not count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import itemgetter

from mtrain.base.heartbeat import Beat, Phase
from mtrain.watch.node import ProcessState


class Lost(StrEnum):
    STOPPED = "is stopped"
    """The rank shows no sign of life: it uses no processor time, and its heartbeat thread does not run."""
    STUCK = "makes no progress"
    """The rank is alive, but neither it nor any other rank makes progress."""
    GONE = "vanished silently"
    ABSENT = "has never begun"


@dataclass(frozen=True)
class Limits:
    """Limits in seconds within which a rank has to make progress."""

    step_s: float
    """Limit in data, forward_backward, update and validation; also for a sign of life in any phase."""
    start_s: float
    """Limit until the first step is done: programs load, kernels are compiled, data are built."""
    save_s: float

    def of(self, phase: Phase, is_first_step: bool) -> float:
        """Returns the limit of a phase; infinite if nothing shows progress."""
        match phase:
            case Phase.START | Phase.BUILD:
                return max(self.start_s, self.step_s)
            case Phase.DATA | Phase.FORWARD_BACKWARD | Phase.UPDATE | Phase.VALIDATION:
                return max(self.start_s, self.step_s) if is_first_step else self.step_s
            case Phase.SAVE:
                return max(self.save_s, self.step_s)
            case Phase.EXPORT:
                return float("inf")


@dataclass(frozen=True)
class Seen:
    """State of one rank of this node at one look."""

    state: Beat
    process: ProcessState | None
    """State of its process; None once it has ended."""


@dataclass(frozen=True)
class Loss:
    """A lost rank, as far as the watchdog can tell."""

    rank: int
    """Number of the rank; negative if only the node is known."""
    how: Lost
    place: str
    silent_s: float
    """Time since the last sign of life or progress of the rank."""
    is_here: bool

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "a rank of this node"
        return (
            f"{who} {self.how}"
            + (f", for {self.silent_s:.0f} s" if self.silent_s else "")
            + (f", in {self.place}" if self.place else "")
        )


@dataclass
class _Clock:
    """Time for which nothing has changed on one rank."""

    sign: object = None
    silent_s: float = 0.0

    def look(self, sign: object, passed_s: float) -> float:
        self.silent_s = 0.0 if sign != self.sign else self.silent_s + passed_s
        self.sign = sign
        return self.silent_s


class Judge:
    """Remembers earlier looks; call it again and again."""

    def __init__(self, limits: Limits, longest_gap_s: float, others: Callable[[], Mapping[int, Beat]] = dict) -> None:
        """Args:
        longest_gap_s: Longest time between two looks that counts; in a longer gap the watchdog was suspended.
        others: Returns the beats of other nodes' ranks; called when this node's ranks make no progress.
        """
        self._limits, self._longest_gap_s, self._others = limits, longest_gap_s, others
        self._life: dict[int, _Clock] = {}
        self._progress: dict[int, _Clock] = {}
        self._elsewhere = _Clock()
        self._asked_s = 0.0
        self._first_steps: dict[int, int] = {}
        self._absent_s = 0.0
        self._looked_s: float | None = None
        self._beats: Mapping[int, Beat] = {}
        self.nearness = 0.0
        """Share of its limit that the slowest rank had used at the latest look; at 1 it is lost."""

    def look(self, now: float, seen: Sequence[Seen], expected: int) -> Loss | None:
        passed_s = min(now - (now if self._looked_s is None else self._looked_s), self._longest_gap_s)
        self._looked_s = now
        gone = next((one for one in seen if one.process is None), None)
        if gone is not None:
            return _loss(gone, Lost.GONE, 0.0)
        if any(one.process is not None and one.process.is_debugged for one in seen):
            self._life, self._progress = {}, {}
            return None
        for one in seen:
            self._note(one, passed_s)
        if seen:
            silent_s, first = max(((self._life[one.state.rank].silent_s, one) for one in seen), key=itemgetter(0))
            if silent_s > self._limits.step_s:
                return _loss(first, Lost.STOPPED, silent_s)
            if (behind := self._standing_still(now, seen)) is not None:
                return behind
        # a rank of this node may not have begun although others have
        self._absent_s = self._absent_s + passed_s if seen and len(seen) < expected else 0.0
        return Loss(-1, Lost.ABSENT, "", self._absent_s, True) if self._absent_s > self._limits.step_s else None

    def _note(self, one: Seen, passed_s: float) -> None:
        state, process = one.state, one.process
        assert process is not None, "those that have ended are found before"
        if state.step:
            self._first_steps.setdefault(state.rank, state.step)
        progress = (state.changed_s, state.step, state.phase)
        self._progress.setdefault(state.rank, _Clock(progress)).look(progress, passed_s)
        life = (progress, state.written_s, process.cpu_s)
        self._life.setdefault(state.rank, _Clock(life)).look(life, passed_s)

    def _standing_still(self, now: float, seen: Sequence[Seen]) -> Loss | None:
        """Finds the slowest rank if no rank of the job has made progress for longer than that rank's limit."""
        here_s = min(self._progress[one.state.rank].silent_s for one in seen)
        shortest_s = min(self._limit(one) for one in seen)
        self._ask_others(now, here_s, shortest_s)
        still_s = min(here_s, self._elsewhere.silent_s) if self._beats else here_s
        behind = _behind(seen, self._beats)
        one = next((each for each in seen if each.state.rank == behind.rank), None)
        limit_s = self._limit(one) if one is not None else shortest_s
        self.nearness = still_s / limit_s
        return replace(behind, silent_s=still_s) if still_s > limit_s else None

    def _ask_others(self, now: float, here_s: float, limit_s: float) -> None:
        """Looks at the ranks of other nodes, but seldom: a thousand nodes may do so at once."""
        if here_s == 0.0:
            self._beats, self._elsewhere = {}, _Clock()
            return
        if here_s < limit_s / 2 or now - self._asked_s < min(max(limit_s / 60, self._longest_gap_s / 2), 10.0):
            return
        is_first, before_s, self._asked_s = not self._beats, self._asked_s, now
        self._beats = self._others()
        sign = {rank: (beat.changed_s, beat.step, beat.phase, beat.left_with) for rank, beat in self._beats.items()}
        # ranks there are assumed to hang for as long as those here, unless a second look shows a change
        self._elsewhere = _Clock(sign, here_s) if is_first else self._elsewhere
        self._elsewhere.look(sign, 0.0 if is_first else now - before_s)

    def _limit(self, one: Seen) -> float:
        state = one.state
        return self._limits.of(state.phase, self._first_steps.get(state.rank, state.step) == state.step)


def _loss(one: Seen, how: Lost, silent_s: float) -> Loss:
    return Loss(one.state.rank, how, one.state.place, silent_s, True)


def _behind(seen: Sequence[Seen], beats: Mapping[int, Beat]) -> Loss:
    """Returns the rank at the earliest place: by step, by phase, then one that does not wait for another."""
    here = {one.state.rank: one for one in seen}
    elsewhere = [beat for rank, beat in beats.items() if rank not in here and beat.left_with is None]
    first = min([*(one.state for one in seen), *elsewhere], key=_earliness)
    own = here.get(first.rank)
    is_stopped = own is not None and own.process is not None and own.process.is_stopped
    return Loss(first.rank, Lost.STOPPED if is_stopped else Lost.STUCK, first.place, 0.0, own is not None)


def _earliness(state: Beat) -> tuple[tuple[int, int], bool, int, int]:
    is_waiting = state.call is not None
    return state.progress, is_waiting, state.calls if is_waiting else 0, state.rank
