"""Pulse of a rank: its current place, in memory shared with the watchdog of its node (`mtrain.watch`).

Writing takes a microsecond, waits for no disk and needs no thread, so the pulse stays true for a rank that is stopped,
loops for ever, or holds the interpreter's lock in C.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mtrain.base.signals import at_interrupt

_SIZE = 4096
_HEAD = struct.Struct("=8sIIIIQ")
_PLACE = struct.Struct("=Qqq20s")
"""Place: time of the change (ns), start number of the run, step, phase."""
_CALL = struct.Struct("=QQi?")
"""Last call: time of the change (ns), number, kind, whether the rank waits in it."""
_NUMBER = struct.Struct("=QQ")
_TEXT = struct.Struct("=64s")
_AT_PLACE, _AT_CALL, _AT_TICK, _AT_BEAT, _AT_END = 64, 128, 192, 256, 320
"""Offsets of the records, one for each writer (training thread, waiting thread, any, heartbeat)."""
_MAGIC = b"mtpulse1"
_TRIES = 5

OPERATIONS = {
    0: "broadcast",
    1: "all-reduce",
    2: "all-reduce",
    3: "reduce",
    4: "all-gather",
    5: "all-gather",
    6: "all-gather",
    7: "gather",
    8: "scatter",
    9: "reduce-scatter",
    10: "all-to-all",
    11: "all-to-all",
    12: "send",
    13: "receive",
    14: "receive",
    15: "barrier",
    16: "reduce-scatter",
    17: "several operations",
    18: "all-reduce",
}
"""Kinds of operations, numbered as torch's c10d::OpType -> names in messages."""
_NO_CALL = -1


class Pulse:
    def __init__(self, path: Path, rank: int, world_size: int, local_world_size: int) -> None:
        """
        Args:
            path: File to create, in a folder in memory (`mtrain.watch.place`).
            local_world_size: Ranks of the run on this node.

        Raises:
            OSError: The file cannot be created.
        """
        self.path, self.start_number = path, 0
        new = path.with_name(f".{path.name}-{os.getpid()}")
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _SIZE)  # a full memory disk refuses here, and not by SIGBUS later
            self._memory = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._ticks, self._calls = itertools.count(1), 0
        _HEAD.pack_into(self._memory, 0, _MAGIC, os.getpid(), rank, world_size, local_world_size, time.monotonic_ns())
        _CALL.pack_into(self._memory, _AT_CALL, 0, 0, _NO_CALL, False)
        self.enter("start", 0)
        self.beat()
        # from here on a reader who finds a pulse whose process has ended considers the rank lost
        at_interrupt(self.leave)
        new.rename(path)  # a reader never finds a part of it

    def enter(self, phase: str, step: int) -> None:
        """Notes that the rank begins a phase of a step."""
        now = time.monotonic_ns()
        _PLACE.pack_into(self._memory, _AT_PLACE, now, self.start_number, step, phase.encode())

    def begin_wait(self, kind: int) -> None:
        """Notes that the rank waits for a collective or message; `kind` is a key of OPERATIONS."""
        self._calls += 1
        _CALL.pack_into(self._memory, _AT_CALL, time.monotonic_ns(), self._calls, kind, True)

    def end_wait(self, kind: int) -> None:
        """Notes that the collective or message has completed."""
        _CALL.pack_into(self._memory, _AT_CALL, time.monotonic_ns(), self._calls, kind, False)

    def tick(self) -> None:
        """Notes progress inside the phase; may be called from any thread."""
        _NUMBER.pack_into(self._memory, _AT_TICK, time.monotonic_ns(), next(self._ticks))

    def beat(self) -> None:
        """Notes that the interpreter runs; called from a thread that does nothing else."""
        _NUMBER.pack_into(self._memory, _AT_BEAT, time.monotonic_ns(), 0)

    def leave(self, how: str) -> None:
        """Notes how the rank ends: `done`, or its error."""
        _TEXT.pack_into(self._memory, _AT_END, how.encode()[:63])

    @property
    def state(self) -> PulseState:
        """State that a reader would see now."""
        return _parsed(bytes(self._memory[:_SIZE]))


@dataclass(frozen=True)
class PulseState:
    """State of a pulse; times in seconds of the node's monotonic clock."""

    pid: int
    rank: int
    world_size: int
    local_world_size: int
    opened_s: float
    start_number: int
    """Number of the run's start; 0 before the rank has a run folder."""
    step: int
    phase: str
    phase_since_s: float
    calls: int
    """Collectives and messages that the rank has waited for, including the last."""
    call: str | None
    """Last collective or message; None before the first."""
    is_waiting: bool
    changed_s: float
    """Time of the last progress: phase, call or tick."""
    beat_s: float
    left_with: str | None

    @property
    def place(self) -> str:
        """Phase, step and last collective in words."""
        inside = f"{self.phase} of step {self.step}" if self.step else self.phase
        if self.call is None:
            return inside
        return f"{inside}, {'waiting in' if self.is_waiting else 'after'} {self.call} {self.calls}"


def read_pulse(path: Path) -> PulseState | None:
    """Reads the pulse once; None if there is none."""
    try:
        data = path.read_bytes()
        for _ in range(_TRIES):  # read again until it was not written meanwhile
            again = path.read_bytes()
            if again == data:
                break
            data = again
        return _parsed(data)
    except (OSError, struct.error, ValueError):
        return None


def _parsed(data: bytes) -> PulseState:
    magic, pid, rank, world_size, local_size, opened = _HEAD.unpack_from(data, 0)
    if magic != _MAGIC:
        raise ValueError("no pulse")
    place_ns, number, step, phase = _PLACE.unpack_from(data, _AT_PLACE)
    call_ns, calls, kind, is_waiting = _CALL.unpack_from(data, _AT_CALL)
    tick_ns, _ = _NUMBER.unpack_from(data, _AT_TICK)
    beat_ns, _ = _NUMBER.unpack_from(data, _AT_BEAT)
    (end,) = _TEXT.unpack_from(data, _AT_END)
    return PulseState(
        pid=pid,
        rank=rank,
        world_size=world_size,
        local_world_size=local_size,
        opened_s=opened / 1e9,
        start_number=number,
        step=step,
        phase=phase.rstrip(b"\0").decode(),
        phase_since_s=place_ns / 1e9,
        calls=calls,
        call=None if kind == _NO_CALL else OPERATIONS.get(kind, "a collective"),
        is_waiting=is_waiting,
        changed_s=max(place_ns, call_ns, tick_ns) / 1e9,
        beat_s=beat_ns / 1e9,
        left_with=end.rstrip(b"\0").decode(errors="replace") or None,
    )


_current: list[Pulse] = []
"""Pulses of this process; the last one counts. Like a log, it is written from anywhere."""


@contextlib.contextmanager
def beating(pulse: Pulse) -> Iterator[Pulse]:
    """Makes `pulse` this process's pulse inside the block, and notes how the block ended."""
    _current.append(pulse)
    how = "done"
    try:
        yield pulse
    except BaseException as error:
        how = type(error).__name__
        raise
    finally:
        pulse.leave(how)
        _current.remove(pulse)


def current() -> Pulse | None:
    """Returns the pulse of this process; None if nobody watches it."""
    return _current[-1] if _current else None


def tick() -> None:
    """Notes progress of this process: a microbatch, a file, a thousand samples."""
    if _current:
        _current[-1].tick()


def _forget_in_child() -> None:
    _current.clear()


os.register_at_fork(after_in_child=_forget_in_child)
