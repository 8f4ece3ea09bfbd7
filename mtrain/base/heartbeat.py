"""State of a rank: its pulse, in memory shared with its node's watchdog, and its heartbeat, in the run folder.

Writing a pulse takes a microsecond, waits for no disk and needs no thread, so the pulse stays correct for a rank that
is stopped, loops forever, or holds the interpreter's lock in C.

A heartbeat is a small file that a thread of each rank writes every few seconds and soon after a change of phase.
Training never waits for it, ranks send nothing to each other, and a full disk only stops the heartbeats. A rank whose
file stops changing is stopped or gone; the others wait for a rank that beats but lags behind.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType

from mtrain.base.fault_points import fault_point
from mtrain.base.signals import at_interrupt
from mtrain.base.spelling import counted


class Phase(StrEnum):
    """Phase of a rank's work, in the order of a run and of a step."""

    START = "start"
    BUILD = "build"
    """Building the model and data, and loading a checkpoint."""
    DATA = "data"
    FORWARD_BACKWARD = "forward_backward"
    UPDATE = "update"
    VALIDATION = "validation"
    SAVE = "save"
    EXPORT = "export"


_ORDER = tuple(Phase)


@dataclass(frozen=True)
class Beat:
    """State of a rank at one time. In a pulse, all times are seconds of the node's monotonic clock, not Unix times."""

    rank: int
    pid: int
    step: int
    """Current step, counted from 1; 0 before the first."""
    phase: Phase
    since_s: float
    """Unix time at which the phase began."""
    written_s: float
    left_with: str | None = None
    """Error that ended the rank, or `done`; None while it runs."""
    memory_bytes: int | None = None
    """Memory of the last step: the peak on the GPU, or resident memory on a CPU; None before the first step."""
    pace_step: int = 0
    """Last step of the window of `pace_s`; 0 before the first window."""
    pace_s: float = 0.0
    """Seconds per step in which the rank worked, without waiting for other ranks."""
    stage: int = 0
    """Pipeline stage of `pace_s`."""
    start: int = 0
    """Number of the run's start; each restart has a higher number."""
    changed_s: float = 0.0
    """Time of the last progress on the rank's monotonic clock; other ranks only check whether it changes."""
    call: str | None = None
    """Collective or message that the rank waits for, with its count on this rank; None if it waits for none."""
    calls: int = 0
    """Collectives and messages that the rank has waited for, including the current one; 0 in the run folder."""
    last_call: str | None = None
    """Last collective or message; None before the first, and in the run folder."""

    @property
    def place(self) -> str:
        """Phase, step and current or last collective, in words."""
        inside = f"{self.phase} of step {self.step}" if self.step else self.phase
        if self.call is not None:
            return f"{inside}, waiting in {self.call}"
        return inside if self.last_call is None else f"{inside}, after {self.last_call}"

    @property
    def progress(self) -> tuple[int, int]:
        """Step and phase as a pair that sorts by time."""
        return self.step, _ORDER.index(self.phase)


_SIZE = 4096
_HEAD = struct.Struct("=8sII")
_PLACE = struct.Struct("=Qqq20s")
"""Record of the phase: time of the change (ns), start number of the run, step, phase."""
_CALL = struct.Struct("=QQi?")
"""Record of the last call: time of the change (ns), number, kind, whether the rank waits in it."""
_NUMBER = struct.Struct("=QQ")
_TEXT = struct.Struct("=64s")
_AT_PLACE, _AT_CALL, _AT_TICK, _AT_BEAT, _AT_END = 64, 128, 192, 256, 320
"""Offsets of the records, each with its own writer (training thread, waiting thread, any thread, heartbeat)."""
_MAGIC = b"mtpulse1"
_TRIES = 5

OPERATIONS = (
    *("broadcast", "all-reduce", "all-reduce", "reduce", "all-gather", "all-gather", "all-gather", "gather"),
    *("scatter", "reduce-scatter", "all-to-all", "all-to-all", "send", "receive", "receive", "barrier"),
    *("reduce-scatter", "several operations", "all-reduce"),
)
"""Names of operations in messages, indexed by torch's c10d::OpType."""
_NO_CALL = -1


class Pulse:
    def __init__(self, path: Path, rank: int) -> None:
        """Creates the file, in an in-memory folder (`mtrain.watch.node`); raises OSError if that fails."""
        self.path, self.start_number, self.opened_s = path, 0, time.monotonic()
        new = path.with_name(f".{path.name}-{os.getpid()}")
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _SIZE)  # fails here on a full disk, instead of with SIGBUS later
            self._memory = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._ticks, self._calls = itertools.count(1), 0
        _HEAD.pack_into(self._memory, 0, _MAGIC, os.getpid(), rank)
        _CALL.pack_into(self._memory, _AT_CALL, 0, 0, _NO_CALL, False)
        self.enter("start", 0)
        self.beat()
        # from here on, a reader that finds the pulse of an ended process considers the rank lost
        at_interrupt(self.leave)
        new.rename(path)  # a reader never sees a partial file

    def enter(self, phase: str, step: int) -> None:
        now = time.monotonic_ns()
        _PLACE.pack_into(self._memory, _AT_PLACE, now, self.start_number, step, phase.encode())

    def begin_wait(self, kind: int) -> None:
        """Records that the rank waits for a collective or message; `kind` is an index of OPERATIONS."""
        self._calls += 1
        _CALL.pack_into(self._memory, _AT_CALL, time.monotonic_ns(), self._calls, kind, True)

    def end_wait(self, kind: int) -> None:
        """Records that the collective or message has completed."""
        _CALL.pack_into(self._memory, _AT_CALL, time.monotonic_ns(), self._calls, kind, False)

    def tick(self) -> None:
        """Records progress inside the phase; any thread may call it."""
        _NUMBER.pack_into(self._memory, _AT_TICK, time.monotonic_ns(), next(self._ticks))

    def beat(self) -> None:
        """Records that the interpreter runs; the heartbeat thread calls it."""
        _NUMBER.pack_into(self._memory, _AT_BEAT, time.monotonic_ns(), 0)

    def leave(self, how: str) -> None:
        """Records how the rank ends: `done`, or its error."""
        _TEXT.pack_into(self._memory, _AT_END, how.encode()[:63])

    @property
    def state(self) -> Beat:
        return _unpacked(bytes(self._memory[:_SIZE]))


def read_pulse(path: Path) -> Beat | None:
    """Reads a pulse; None if the file is missing or not a pulse."""
    try:
        data = path.read_bytes()
        for _ in range(_TRIES):  # until two reads agree, so that no write is in progress
            again = path.read_bytes()
            if again == data:
                break
            data = again
        return _unpacked(data)
    except (OSError, struct.error, ValueError):
        return None


def _unpacked(data: bytes) -> Beat:
    magic, pid, rank = _HEAD.unpack_from(data, 0)
    if magic != _MAGIC:
        raise ValueError("not a pulse")
    place_ns, start, step, phase = _PLACE.unpack_from(data, _AT_PLACE)
    call_ns, calls, kind, is_waiting = _CALL.unpack_from(data, _AT_CALL)
    tick_ns, _ = _NUMBER.unpack_from(data, _AT_TICK)
    beat_ns, _ = _NUMBER.unpack_from(data, _AT_BEAT)
    (end,) = _TEXT.unpack_from(data, _AT_END)
    call = None if kind == _NO_CALL else f"{OPERATIONS[kind] if kind < len(OPERATIONS) else 'a collective'} {calls}"
    return Beat(
        rank=rank,
        pid=pid,
        step=step,
        phase=Phase(phase.rstrip(b"\0").decode()),
        since_s=place_ns / 1e9,
        written_s=beat_ns / 1e9,
        left_with=end.rstrip(b"\0").decode(errors="replace") or None,
        start=start,
        changed_s=max(place_ns, call_ns, tick_ns) / 1e9,
        call=call if is_waiting else None,
        calls=calls,
        last_call=call,
    )


_pulses: list[Pulse] = []
"""Pulses of this process; the last one is current. Global, like a logger, since code anywhere reports progress."""


@contextlib.contextmanager
def beating(pulse: Pulse) -> Iterator[Pulse]:
    """Makes `pulse` this process's pulse inside the block, and records how the block ended."""
    _pulses.append(pulse)
    how = "done"
    try:
        yield pulse
    except BaseException as error:
        how = type(error).__name__
        raise
    finally:
        pulse.leave(how)
        _pulses.remove(pulse)


def current_pulse() -> Pulse | None:
    """Returns the pulse of this process; None without a watchdog."""
    return _pulses[-1] if _pulses else None


def tick() -> None:
    """Records progress of this process, such as a microbatch, a file or a thousand samples."""
    if _pulses:
        _pulses[-1].tick()


os.register_at_fork(after_in_child=_pulses.clear)

_BEATS_PER_TIMEOUT = 20
_INTERVALS_S = (0.2, 1.0)
"""Shortest and longest interval between beats in a small run."""
_MAX_BEATS_PER_S = 500
"""Limit of beats per second over all ranks, to spare a shared file system."""
_CHANGES_PER_INTERVAL = 10
"""Limit of phase changes written per interval."""
_INTERVALS_OF_SILENCE = 2.5
"""Number of intervals without a beat after which a rank counts as silent."""
_SHORTEST_SILENCE_S = 1.0
_NUM_BYTES = 512
"""Size of a heartbeat file from its first beat, so that later beats need no more disk space."""
_MAX_NAMED = 8


def heartbeat_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.json"


def read_beat(folder: Path, rank: int) -> Beat | None:
    """Reads the rank's latest beat; None if it is missing or being written."""
    try:
        return _parsed(heartbeat_file(folder, rank).read_bytes())
    except OSError:
        return None


def _parsed(text: bytes) -> Beat | None:
    try:
        content = json.loads(text)
        return Beat(**(content | {"phase": Phase(content["phase"])}))
    except (ValueError, TypeError, KeyError):
        return None


class Heartbeat:
    """Writes this rank's beats from a thread that runs inside the `with` block."""

    def __init__(self, folder: Path, rank: int, world_size: int, timeout_s: float, start: int = 0) -> None:
        """
        Args:
            timeout_s: Longest time that ranks wait for each other; the interval between beats is much shorter.
            start: Number of this start of the run; the thread stops writing once a later start beats.
        """
        self._folder, self._world_size = folder, world_size
        self.on_beat: list[Callable[[], None]] = []
        """Actions that the thread calls in order at every beat; they may raise OSError."""
        shortest, longest = _INTERVALS_S
        interval_s = min(max(timeout_s / _BEATS_PER_TIMEOUT, shortest), longest)
        self._interval_s = max(interval_s, world_size / _MAX_BEATS_PER_S)
        now = time.time()
        self._beat = Beat(rank, os.getpid(), 0, Phase.START, now, now, start=start)
        self._phases_s: dict[str, float] = {}
        self._entered_s = time.monotonic()
        self._changed, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        fault_point(Phase.START, self._beat.rank, 0)
        return self

    @property
    def step(self) -> int:
        return self._beat.step

    @property
    def place(self) -> str:
        return self._beat.place

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds in each phase since this object was created."""
        now, phase = time.monotonic() - self._entered_s, self._beat.phase
        return {**self._phases_s, str(phase): self._phases_s.get(phase, 0.0) + now}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._beat = replace(self._beat, left_with="done" if kind is None else kind.__name__)
        self._ended.set()
        self._changed.set()
        self._thread.join(self._interval_s)  # a hanging disk must not keep the rank from ending

    def enter(self, phase: Phase, step: int) -> None:
        """Records that this rank begins a phase; the thread writes it soon after."""
        if _pulses:
            _pulses[-1].enter(phase, step)
        now, before = time.monotonic(), self._beat.phase
        self._phases_s[before] = self._phases_s.get(before, 0.0) + now - self._entered_s
        self._entered_s = now
        self._beat = replace(self._beat, phase=phase, step=step, since_s=time.time())
        self._changed.set()
        fault_point(phase, self._beat.rank, step)

    def note_memory(self, memory_bytes: int) -> None:
        """Records the memory of this rank's last step for the next beat."""
        self._beat = replace(self._beat, memory_bytes=memory_bytes)

    def note_pace(self, step: int, stage: int, seconds: float) -> None:
        """Records the seconds per step in which this rank worked, over a window that ends with `step`."""
        self._beat = replace(self._beat, pace_step=step, stage=stage, pace_s=seconds)

    def of_all(self) -> list[Beat | None]:
        """Returns the beats of all other ranks in order, None where missing, then this rank's current beat."""
        return [*self._other_beats(), self._beat]

    def missing(self) -> str:
        """Describes the ranks that are lost or that the others wait for; empty if the heartbeats do not show any.

        Waits for the time of two beats, to see which ranks still beat.
        """
        before = self._other_beats()
        time.sleep(max(_SHORTEST_SILENCE_S, _INTERVALS_OF_SILENCE * self._interval_s))
        after = self._other_beats()
        silent = [new for old, new in zip(before, after) if old == new and new is not None and new.left_with is None]
        return verdict(silent, [beat for beat in [*after, self._beat] if beat is not None])

    def _other_beats(self) -> list[Beat | None]:
        ranks = [rank for rank in range(self._world_size) if rank != self._beat.rank]
        return [read_beat(self._folder, rank) for rank in ranks]

    def _run(self) -> None:
        while True:
            has_ended = self._ended.is_set()
            self._changed.clear()
            with contextlib.suppress(OSError):  # the next beat tries again; training must go on
                self._write()
            for action in self.on_beat:
                with contextlib.suppress(OSError):
                    action()
            if has_ended:
                return
            self._ended.wait(self._interval_s / _CHANGES_PER_INTERVAL)
            self._changed.wait(self._interval_s * (1 - 1 / _CHANGES_PER_INTERVAL))

    def _write(self) -> None:
        """Writes the beat; reopens the file each time, so that other nodes on a network file system see it."""
        beat = replace(self._beat, written_s=time.time())
        if _pulses:
            pulse = _pulses[-1].state
            beat = replace(beat, changed_s=pulse.changed_s, call=pulse.call)
        text = json.dumps(asdict(beat))
        self._folder.mkdir(parents=True, exist_ok=True)
        file = os.open(heartbeat_file(self._folder, self._beat.rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            before = _parsed(os.pread(file, _NUM_BYTES, 0))
            if before is not None and before.start > self._beat.start:
                return  # a later start of the run beats here, because this one seemed dead
            # right after the check: a process suspended in between would overwrite the beats of a later start
            os.pwrite(file, text.ljust(_NUM_BYTES - 1).encode() + b"\n", 0)
        finally:
            os.close(file)


def verdict(silent: Sequence[Beat], everyone: Sequence[Beat]) -> str:
    """Describes the ranks at fault: the silent ones, otherwise the failed ones, otherwise the slowest; "" if none."""
    now = time.time()
    if silent:
        return _listed(silent, lambda beat: f"silent for {now - beat.written_s:.1f} s, in {beat.place}")
    left = [beat for beat in everyone if beat.left_with not in (None, "done", "RankLostError")]
    if left:
        return _listed(left, lambda beat: f"left with {beat.left_with}, in {beat.place}")
    progress = [beat.progress for beat in everyone]
    behind = [beat for beat in everyone if beat.progress == min(progress)] if len(set(progress)) > 1 else []
    return _listed(behind, lambda beat: f"behind the others, in {beat.place} for {now - beat.since_s:.1f} s")


def _listed(beats: Sequence[Beat], state: Callable[[Beat], str]) -> str:
    more = [counted(len(beats) - _MAX_NAMED, "more rank")] if len(beats) > _MAX_NAMED else []
    return "; ".join([*(f"rank {beat.rank}: {state(beat)}" for beat in beats[:_MAX_NAMED]), *more])
