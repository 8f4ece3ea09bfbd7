"""Decides which rank is lost, from repeated looks at a node's ranks and, once they make no progress, at other nodes.

A training step ends on all ranks or on none, so a job hangs when none of its ranks makes progress: all wait for the
rank that is furthest behind. Time in which the watchdog itself was suspended does not count.
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
    """The rank is alive, but no rank makes progress."""
    GONE = "vanished silently"
    ABSENT = "has never begun"


@dataclass(frozen=True)
class Limits:
    """Seconds within which a rank has to make progress."""

    step_s: float
    """Limit for data, forward_backward, update and validation, and for a sign of life in any phase."""
    start_s: float
    """Limit until the first step is done, while programs load, kernels are compiled and data are built."""
    save_s: float

    def of(self, phase: Phase, is_first_step: bool) -> float:
        """Returns the limit of a phase; infinite for an export, which reports no progress."""
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
    """One rank of this node at one look."""

    state: Beat
    process: ProcessState | None
    """None once the process has ended."""


@dataclass(frozen=True)
class Loss:
    """A lost rank, as far as the watchdog can identify it."""

    rank: int
    """Rank; negative if only its node is known."""
    how: Lost
    place: str
    silent_s: float
    """Seconds since the rank's last sign of life or progress."""
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
    """Measures for how long a sign of life or progress has not changed."""

    sign: object = None
    silent_s: float = 0.0

    def look(self, sign: object, passed_s: float) -> float:
        self.silent_s = 0.0 if sign != self.sign else self.silent_s + passed_s
        self.sign = sign
        return self.silent_s


class Judge:
    """Judges the ranks of one node; remembers earlier looks."""

    def __init__(
        self, limits: Limits, longest_gap_s: float, remote_beats: Callable[[], Mapping[int, Beat]] = dict
    ) -> None:
        """Args:
        longest_gap_s: Longest time between two looks that counts; in a longer gap the watchdog was suspended.
        remote_beats: Returns the beats of other nodes' ranks; called once this node's ranks make no progress.
        """
        self._limits, self._longest_gap_s, self._remote_beats = limits, longest_gap_s, remote_beats
        self._life: dict[int, _Clock] = {}
        self._progress: dict[int, _Clock] = {}
        self._elsewhere = _Clock()
        self._asked_s = 0.0
        self._first_steps: dict[int, int] = {}
        self._absent_s = 0.0
        self._looked_s: float | None = None
        self._beats: Mapping[int, Beat] = {}
        self.nearness = 0.0
        """Share of its limit that the slowest rank has used; at 1 it is lost."""

    def look(self, now: float, seen: Sequence[Seen], expected: int) -> Loss | None:
        """Returns the rank that is lost at time `now` (seconds), or None; `expected` is the node's number of ranks."""
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
        # some ranks of this node have begun, but not all
        self._absent_s = self._absent_s + passed_s if seen and len(seen) < expected else 0.0
        return Loss(-1, Lost.ABSENT, "", self._absent_s, True) if self._absent_s > self._limits.step_s else None

    def _note(self, one: Seen, passed_s: float) -> None:
        state, process = one.state, one.process
        assert process is not None, "the caller has handled ended ranks"
        if state.step:
            self._first_steps.setdefault(state.rank, state.step)
        progress = (state.changed_s, state.step, state.phase)
        self._progress.setdefault(state.rank, _Clock(progress)).look(progress, passed_s)
        life = (progress, state.written_s, process.cpu_s)
        self._life.setdefault(state.rank, _Clock(life)).look(life, passed_s)

    def _standing_still(self, now: float, seen: Sequence[Seen]) -> Loss | None:
        """Returns the slowest rank if no rank of the job has made progress for longer than that rank's limit."""
        here_s = min(self._progress[one.state.rank].silent_s for one in seen)
        shortest_s = min(self._limit(one) for one in seen)
        self._ask_others(now, here_s, shortest_s)
        still_s = min(here_s, self._elsewhere.silent_s) if self._beats else here_s
        behind = _behind(seen, self._beats)
        one = next((rank for rank in seen if rank.state.rank == behind.rank), None)
        limit_s = self._limit(one) if one is not None else shortest_s
        self.nearness = still_s / limit_s
        return replace(behind, silent_s=still_s) if still_s > limit_s else None

    def _ask_others(self, now: float, here_s: float, limit_s: float) -> None:
        """Reads the beats of other nodes, but seldom, because a thousand nodes may do so at once."""
        if here_s == 0.0:
            self._beats, self._elsewhere = {}, _Clock()
            return
        if here_s < limit_s / 2 or now - self._asked_s < min(max(limit_s / 60, self._longest_gap_s / 2), 10.0):
            return
        is_first, before_s, self._asked_s = not self._beats, self._asked_s, now
        self._beats = self._remote_beats()
        sign = {rank: (beat.changed_s, beat.step, beat.phase, beat.left_with) for rank, beat in self._beats.items()}
        # assumes that those ranks have hung for as long as these, unless a second look shows a change
        self._elsewhere = _Clock(sign, here_s) if is_first else self._elsewhere
        self._elsewhere.look(sign, 0.0 if is_first else now - before_s)

    def _limit(self, one: Seen) -> float:
        state = one.state
        return self._limits.of(state.phase, self._first_steps.get(state.rank, state.step) == state.step)


def _loss(one: Seen, how: Lost, silent_s: float) -> Loss:
    return Loss(one.state.rank, how, one.state.place, silent_s, True)


def _behind(seen: Sequence[Seen], beats: Mapping[int, Beat]) -> Loss:
    """Returns the rank that is furthest behind: by step, by phase, then one that waits for no collective."""
    here = {one.state.rank: one for one in seen}
    elsewhere = [beat for rank, beat in beats.items() if rank not in here and beat.left_with is None]
    first = min([*(one.state for one in seen), *elsewhere], key=_earliness)
    local_rank = here.get(first.rank)
    is_stopped = local_rank is not None and local_rank.process is not None and local_rank.process.is_stopped
    return Loss(first.rank, Lost.STOPPED if is_stopped else Lost.STUCK, first.place, 0.0, local_rank is not None)


def _earliness(state: Beat) -> tuple[tuple[int, int], bool, int, int]:
    is_waiting = state.call is not None
    return state.progress, is_waiting, state.calls if is_waiting else 0, state.rank
