"""The watchdog process, `python -m mtrain.watch.watchdog` with its settings as JSON; `mtrain.watch.rank` starts it.

It does not import torch, uses no GPU, and exits when the ranks of its node have left. See docs/machines/survive.md.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mtrain.base.errors import RankLostError
from mtrain.base.heartbeat import Beat, read_beat, read_pulse
from mtrain.runs.failure import FailureClass, FailureRecord, record_failure, records_folder, summary
from mtrain.watch.judge import Judge, Limits, Loss, Lost, Seen
from mtrain.watch.node import memory_kills, process_state
from mtrain.watch.stacks import ask, dump, innermost

ENDING = "ending"
"""File next to the pulses that says that the watchdog is ending the job; it deletes the folder after its report."""

ORDERED = "ordered"
"""File next to the pulses that says that the launcher is ending all ranks, so none of them counts as lost."""

_LOOKS_PER_TIMEOUT = 30
_LOOK_S = (0.1, 0.5)
_LONGEST_GAP = 4.0
"""Longest gap that counts, in looks; in a longer one the ranks did not run, either."""
_FIRST_S = 60.0
"""Seconds within which the first rank has to appear."""
_HEAD_START_S = 3.0
"""Seconds that other nodes wait, so that the lost rank is the first to end."""
_OLD_S = 600.0
_EARLY = 0.8
"""Share of a rank's limit after which the watchdog asks all ranks for their stacks."""
_GRACE_S = 6.0
"""Seconds in which the other ranks may leave by themselves after the lost one was killed."""
_GONE_S = 0.7
"""Seconds before an ended rank counts as lost; a launcher that is ending all ranks kills the watchdog earlier."""


@dataclass(frozen=True)
class Settings:
    """Settings of the watchdog, from the node's first rank."""

    node: str
    run_dir: str
    local_world_size: int
    world_size: int
    parent: int
    step_s: float
    start_s: float
    save_s: float
    launch: str | None

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class Watchdog:
    def __init__(self, settings: Settings) -> None:
        self._settings, self._node, self._run_dir = settings, Path(settings.node), Path(settings.run_dir)
        shortest, longest = _LOOK_S
        self._look_s = min(max(settings.step_s / _LOOKS_PER_TIMEOUT, shortest), longest)
        limits = Limits(settings.step_s, settings.start_s, settings.save_s)
        self._judge = Judge(limits, _LONGEST_GAP * self._look_s, self._beats_of_others)
        self._memory_kills = memory_kills()
        self._known_gone: set[int] = set()
        self._began_s, self._has_asked = time.monotonic(), False

    def run(self) -> None:
        """Watches until the ranks of this node have left, or until it has ended the job."""
        while not self._is_over():
            now = time.monotonic()
            states = self._states()
            seen = [Seen(state, process_state(state.pid)) for state in states if state.left_with is None]
            seen = [one for one in seen if one.state.pid not in self._known_gone]
            expected = self._settings.local_world_size - (len(states) - len(seen))
            loss = self._judge.look(now, seen, expected)
            if loss is not None and loss.how is Lost.GONE:
                self._note_gone(loss, [one.state for one in seen if one.process is None])
            elif loss is not None:
                self._end(self._named(loss, states), states)
                return
            # asks before the limit: ranks that wait for the lost one leave as soon as it is killed
            elif self._judge.nearness < _EARLY:
                self._has_asked = False
            elif not self._has_asked:
                self._has_asked = True
                ask([state for state in states if state.left_with is None])
            time.sleep(self._look_s)

    def _is_over(self) -> bool:
        if self._is_ordered():
            return True
        states = self._states()
        if any(state.left_with is None and process_state(state.pid) is not None for state in states):
            return False
        if any(state.left_with is None and state.pid not in self._known_gone for state in states):
            return False  # one has ended silently, and run() has yet to report it
        if len(states) >= self._settings.local_world_size or process_state(self._settings.parent) is None:
            return True
        return time.monotonic() - self._began_s > max(_FIRST_S, self._settings.step_s)

    def _is_ordered(self) -> bool:
        return (self._node / ORDERED).exists()

    def _states(self) -> list[Beat]:
        states = (read_pulse(path) for path in sorted(self._node.glob("rank_*")))
        return [state for state in states if state is not None]

    def _beats_of_others(self) -> Mapping[int, Beat]:
        here = {state.rank for state in self._states()}
        if len(here) >= self._settings.world_size:
            return {}
        remote_ranks = (rank for rank in range(self._settings.world_size) if rank not in here)
        number = max((state.start for state in self._states()), default=0)
        beats = ((rank, read_beat(self._run_dir / "heartbeats", rank)) for rank in remote_ranks)
        return {rank: beat for rank, beat in beats if beat is not None and beat.start == number}

    def _named(self, loss: Loss, states: Sequence[Beat]) -> Loss:
        """Fills in which rank has never begun, if the job has only one node."""
        if loss.rank >= 0 or self._settings.local_world_size != self._settings.world_size:
            return loss
        missing = set(range(self._settings.world_size)) - {state.rank for state in states}
        return replace(loss, rank=min(missing, default=-1))

    def _note_gone(self, loss: Loss, gone: Sequence[Beat]) -> None:
        """Reports a rank that ended without a report; its launcher ends the other ranks."""
        time_s = time.time()
        time.sleep(_GONE_S)
        self._known_gone |= {state.pid for state in gone}
        if self._is_ordered():
            return
        kind, text = FailureClass.LOST_PEER, f"{loss}: killed, or crashed in a library"
        if memory_kills() > self._memory_kills:
            kind, text = FailureClass.OUT_OF_MEMORY, f"{loss}: the kernel killed a process for memory meanwhile"
        self._record(self._failure(loss, kind, text, gone, time_s))

    def _end(self, loss: Loss, states: Sequence[Beat]) -> None:
        """Reports the lost rank, saves all stacks of this node, and ends its ranks, the lost one first."""
        time_s = time.time()
        print(f"watchdog: {loss}; this job is ended", file=sys.stderr, flush=True)
        (self._node / ENDING).touch()
        running = [state for state in states if process_state(state.pid) is not None]
        failure = self._failure(loss, FailureClass.LOST_PEER, str(loss), states, time_s)
        if loss.is_here:  # before the stacks, because a launcher may kill this process at any moment
            self._record(failure, is_last=False)
        out = records_folder(self._run_dir, _number(states))
        files = dump(self._node, states, loss.rank, out)
        lost_files = [files[loss.rank]] if loss.rank in files else []
        stack = [frame for path in lost_files for frame in innermost(path.read_text(errors="replace"))]
        if loss.is_here:
            self._record(replace(failure, stack=tuple(stack), files=tuple(map(str, lost_files))))
        else:
            time.sleep(_HEAD_START_S)
        self._kill([state for state in running if state.rank == loss.rank])
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and any(process_state(state.pid) is not None for state in running):
            time.sleep(self._look_s)
        self._kill(running)

    def _kill(self, states: Sequence[Beat]) -> None:
        for state in states:
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGKILL)

    def _failure(
        self, loss: Loss, kind: FailureClass, text: str, states: Sequence[Beat], time_s: float
    ) -> FailureRecord:
        return FailureRecord(
            rank=loss.rank,
            kind=kind,
            error=loss.how.name.lower(),
            message=text,
            exit_code=RankLostError.exit_code,
            reported_by="watchdog",
            time_s=time_s,
            place=loss.place or None,
            start=_number(states),
            launch=self._settings.launch,
            host=socket.gethostname(),
        )

    def _record(self, failure: FailureRecord, is_last: bool = True) -> None:
        """Writes a record into the run folder if this start has opened it, or else prints the final summary."""
        if failure.start:
            with contextlib.suppress(OSError):  # a full disk: only the line on standard error remains
                record_failure(self._run_dir, failure, again=True)
        elif is_last:
            print(summary(failure, self._run_dir), end="", file=sys.stderr, flush=True)


def _number(states: Sequence[Beat]) -> int:
    return max((state.start for state in states), default=0)


def _sweep(current: Path) -> None:
    """Deletes folders of past launches whose watchdog was killed with their ranks, as under Slurm."""
    for folder in current.parent.glob(f"mtrain-{os.getuid()}-*"):
        with contextlib.suppress(OSError):  # the watchdog of another launch may delete the folder at this moment
            pulses = (read_pulse(path) for path in folder.glob("rank_*"))
            is_used = any(pulse is not None and process_state(pulse.pid) is not None for pulse in pulses)
            if folder != current and not is_used and time.time() - folder.stat().st_mtime > _OLD_S:
                shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the ranks, which may take minutes to save
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    os.nice(5)
    settings = Settings(**json.loads(sys.argv[1]))
    _sweep(Path(settings.node))
    Watchdog(settings).run()
    shutil.rmtree(settings.node, ignore_errors=True)  # not after an error: another watchdog may be started


if __name__ == "__main__":
    main()
