"""Which rank is lost: from looks at the ranks of a node, and, when these stand still, at what the others have written.

A step of training ends on all ranks or on none, so a job stands still when no rank of it does anything. Then the rank
that has come least far is the one that the others wait for. Time that the watchdog itself did not run does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from mtrain.base.heartbeat import Beat, Phase
from mtrain.base.pulse import PulseState
from mtrain.watch.process import ProcessState

_ORDER = {str(phase): number for number, phase in enumerate(Phase)}
_MOST_NAMED = 8


class Lost(StrEnum):
    """How a rank is lost."""

    STOPPED = "is stopped"
    """It gives no sign of life: no time of a processor, no thread of its beats."""
    STUCK = "makes no progress"
    """It lives, but neither it nor any other rank gets on."""
    GONE = "is gone without a word"
    ABSENT = "has never begun"


@dataclass(frozen=True)
class Limits:
    """Seconds in which a rank has to do something."""

    step_s: float
    """In data, forward_backward, update and validation; and to give a sign of life anywhere."""
    start_s: float
    """Until the first step is done: programs load, kernels are compiled, data are built."""
    save_s: float

    def of(self, phase: str, is_first_step: bool) -> float:
        """In this phase; infinite where nothing shows progress."""
        match Phase(phase):
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
    """One rank of this node at one look."""

    state: PulseState
    process: ProcessState | None
    """None: it has ended."""


@dataclass(frozen=True)
class Loss:
    """A rank that the job waits for."""

    rank: int
    """Its number; negative where only the node is known."""
    how: Lost
    place: str
    silent_s: float
    """How long nothing has come from it."""
    is_here: bool
    """On this node."""

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "a rank of this node"
        return (
            f"{who} {self.how}"
            + (f", for {self.silent_s:.0f} s" if self.silent_s else "")
            + (f", in {self.place}" if self.place else "")
        )


@dataclass
class _Clock:
    """Of one rank: for how long nothing has changed."""

    sign: object = None
    silent_s: float = 0.0

    def look(self, sign: object, passed_s: float) -> float:
        self.silent_s = 0.0 if sign != self.sign else self.silent_s + passed_s
        self.sign = sign
        return self.silent_s


class Judge:
    """Remembers looks; asked again and again."""

    def __init__(self, limits: Limits, longest_gap_s: float, others: Callable[[], Mapping[int, Beat]] = dict) -> None:
        """
        Args:
            limits: For how long is too long.
            longest_gap_s: Between two looks; of a longer one no more counts, as the node or the watchdog stood still.
            others: The beats of the ranks of other nodes; asked where those of this one stand still.
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
        """How much of its time the rank that is behind has used up, by the latest look; 1: it is lost."""

    def look(self, now: float, seen: Sequence[Seen], expected: int) -> Loss | None:
        """Who is lost, where somebody is.

        Args:
            now: Of a monotonic clock.
            seen: The ranks of this node that have begun and not left by themselves.
            expected: How many ranks this node has to have, those that have left included.
        """
        passed_s = min(now - (now if self._looked_s is None else self._looked_s), self._longest_gap_s)
        self._looked_s = now
        gone = [one for one in seen if one.process is None]
        if gone:
            return _loss(gone[0], Lost.GONE, 0.0)
        if any(one.process is not None and one.process.is_debugged for one in seen):
            self._life.clear(), self._progress.clear()  # type: ignore[func-returns-value]
            return None
        for one in seen:
            self._note(one, passed_s)
        return self._lifeless(seen) or self._standing_still(now, seen) or self._absent(seen, expected, passed_s)

    def _note(self, one: Seen, passed_s: float) -> None:
        state, process = one.state, one.process
        assert process is not None, "those that have ended are found before"
        if state.step:
            self._first_steps.setdefault(state.rank, state.step)
        progress = (state.changed_s, state.step, state.phase)
        self._progress.setdefault(state.rank, _Clock(progress)).look(progress, passed_s)
        life = (progress, state.beat_s, process.cpu_s)
        self._life.setdefault(state.rank, _Clock(life)).look(life, passed_s)

    def _lifeless(self, seen: Sequence[Seen]) -> Loss | None:
        silent = [one for one in seen if self._life[one.state.rank].silent_s > self._limits.step_s]
        if not silent:
            return None
        first = max(silent, key=lambda one: self._life[one.state.rank].silent_s)
        return _loss(first, Lost.STOPPED, self._life[first.state.rank].silent_s)

    def _standing_still(self, now: float, seen: Sequence[Seen]) -> Loss | None:
        """Where no rank of the job has done anything for longer than the one that is behind may take."""
        if not seen:
            return None
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
        """Looks at the ranks of other nodes, seldom: a thousand nodes may do so at once."""
        if here_s == 0.0:
            self._beats, self._elsewhere = {}, _Clock()
            return
        if here_s < limit_s / 2 or now - self._asked_s < min(max(limit_s / 60, self._longest_gap_s / 2), 10.0):
            return
        is_first, before_s, self._asked_s = not self._beats, self._asked_s, now
        self._beats = self._others()
        sign = {rank: (beat.changed_s, beat.step, beat.phase, beat.left_with) for rank, beat in self._beats.items()}
        # what stood still here has stood still there for as long, unless a second look says otherwise
        self._elsewhere = _Clock(sign, here_s) if is_first else self._elsewhere
        self._elsewhere.look(sign, 0.0 if is_first else now - before_s)

    def _limit(self, one: Seen) -> float:
        state = one.state
        return self._limits.of(state.phase, self._first_steps.get(state.rank, state.step) == state.step)

    def _absent(self, seen: Sequence[Seen], expected: int, passed_s: float) -> Loss | None:
        """A rank of this node that has not begun though others have."""
        self._absent_s = self._absent_s + passed_s if seen and len(seen) < expected else 0.0
        if self._absent_s <= self._limits.step_s:
            return None
        return Loss(-1, Lost.ABSENT, "", self._absent_s, True)


def _loss(one: Seen, how: Lost, silent_s: float) -> Loss:
    return Loss(one.state.rank, how, one.state.place, silent_s, True)


def _behind(seen: Sequence[Seen], beats: Mapping[int, Beat]) -> Loss:
    """Of all ranks the one that has come least far: by step, by phase, then who does not wait for another one."""
    here = {one.state.rank for one in seen}
    found: list[tuple[tuple[int, int, bool, int], Loss]] = []
    for one in seen:
        state = one.state
        key = (state.step, _ORDER[state.phase], state.is_waiting, state.calls if state.is_waiting else 0)
        stopped = one.process is not None and one.process.is_stopped
        how = Lost.STOPPED if stopped else Lost.STUCK
        found.append((key, _loss(one, how, 0.0)))
    for rank, beat in beats.items():
        if rank not in here and beat.left_with is None:
            key = (beat.step, _ORDER[beat.phase], beat.call is not None, 0)
            found.append((key, Loss(rank, Lost.STUCK, beat.place, 0.0, False)))
    return min(found, key=lambda pair: (pair[0], pair[1].rank))[1]
