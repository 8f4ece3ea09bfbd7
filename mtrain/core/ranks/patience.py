"""Waits for other ranks: how long they may take, not counting suspensions, and how long they took.

gloo measures its timeouts by a clock that continues while a job is suspended: after a suspension longer than the
timeout every open wait would fail at once. So gloo's own timeouts are set too high to be reached, and a thread, which
stops with its process, counts how long each wait has lasted. If one takes too long, the thread shuts down the
connections of all groups, which ends all waits here and those of the other ranks, as gloo's timeout does.

Every collective and every message of torch.distributed ends in `Work.wait`. On CPUs the host waits there; on GPUs the
stream does, and the host only when it reads a number.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from mtrain.base.awake import AwakeClock
from mtrain.base.heartbeat import current_pulse

_NEVER = timedelta(days=365)
_POLLS_PER_LIMIT = 40
_POLL_S = (0.05, 0.5)
_LONGEST_GAP = 4.0
"""Most polls that count at once; a longer gap means that this process was suspended."""
_DESCRIPTORS = Path("/proc/self/fd")


class Patience:
    """Limit on this process's waits for other ranks; a thread counts them inside the block of `limited`."""

    def __init__(self, limit_s: float) -> None:
        shortest, longest = _POLL_S
        self._limit_s, self._poll_s = limit_s, min(max(limit_s / _POLLS_PER_LIMIT, shortest), longest)
        self._sockets: dict[int, str] = {}
        self._waits: dict[int, object] = {}
        """Thread -> a mark of its current wait."""
        self._is_over, self.ended = False, threading.Event()

    def take(self, sockets: dict[int, str], groups: Iterable[dist.ProcessGroup]) -> None:
        """Makes groups wait by this clock instead of gloo's, if they have opened any of these sockets, by descriptor
        and name."""
        connected = {descriptor: name for descriptor, name in sockets.items() if _is_connected(descriptor)}
        if connected:
            self._sockets |= connected
            set_timeouts(groups, _NEVER)

    def wait(self, plain: Callable[..., Any], work: Any, *arguments: Any, **options: Any) -> Any:
        """Waits for a collective or a message by `plain`, the method of torch; raises RuntimeError after the limit."""
        try:
            with self.counted():
                # a message would keep the timeout that its group was opened with
                return plain(work, *arguments, **options) if arguments or options else plain(work, _NEVER)
        except RuntimeError as error:
            if not self._is_over:
                raise
            raise RuntimeError(f"Timed out waiting {self._limit_s:g} s for another rank") from error

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what this thread does inside the block as a wait."""
        thread = threading.get_ident()
        self._waits[thread] = object()
        try:
            yield
        finally:
            del self._waits[thread]

    def count(self) -> None:
        """Counts until `ended` is set, or a wait has taken too long."""
        clock, since = AwakeClock(_LONGEST_GAP * self._poll_s), dict[object, float]()
        while not self.ended.wait(self._poll_s):
            now = clock()
            since = {wait: since.get(wait, now) for wait in self._waits.copy().values()}
            if any(now - began > self._limit_s for began in since.values()):
                self._is_over = True
                self._shut_down()
                return

    def _shut_down(self) -> None:
        """Shuts down the connections of all groups, which ends all waits for other ranks."""
        there = _sockets()
        for descriptor, name in self._sockets.items():
            if there.get(descriptor) == name:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


_current: list[Patience] = []


def current() -> Patience | None:
    """Returns the limit of the world that this process has opened; None if its groups wait by their own clocks."""
    return _current[-1] if _current else None


@contextlib.contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Limits every wait for groups of `opening` inside the block, in seconds without suspensions."""
    own = Patience(limit_s)
    thread = threading.Thread(target=own.count, name="patience", daemon=True)
    thread.start()
    _current.append(own)
    try:
        yield
    finally:
        _current.remove(own)
        own.ended.set()
        thread.join()


@contextlib.contextmanager
def opening() -> Iterator[None]:
    """Applies the limit of the enclosing `limited` to groups that are opened inside the block."""
    if (own := current()) is None:
        yield
        return
    sockets, groups = _sockets().items(), set(dist.distributed_c10d._world.pg_map)
    yield
    new = {descriptor: name for descriptor, name in _sockets().items() if (descriptor, name) not in sockets}
    own.take(new, set(dist.distributed_c10d._world.pg_map) - groups)


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Counts what this thread does inside the block as a wait, such as closing groups."""
    own = current()
    with contextlib.nullcontext() if own is None else own.counted():
        yield


def set_timeouts(groups: Iterable[dist.ProcessGroup], timeout: timedelta) -> None:
    """Sets the timeout of collectives of these groups, by the clock of their backend."""
    # public since torch 2.15, which warns about the old name
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in groups:
        set_timeout(timeout, group)


def _sockets() -> dict[int, str]:
    """Returns descriptor -> unique name of all sockets that this process has open."""
    found = {}
    with contextlib.suppress(OSError):
        for link in _DESCRIPTORS.iterdir():
            with contextlib.suppress(OSError):
                if (name := os.readlink(link)).startswith("socket:"):
                    found[int(link.name)] = name
    return found


def _is_connected(descriptor: int) -> bool:
    """Says whether the descriptor leads to another process, and does not listen."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.getpeername()
        return connection.family in (socket.AF_INET, socket.AF_INET6)
    return False


_waited_s = [0.0]
_plain_wait = Work.wait


def waited_s() -> float:
    """Returns the seconds that this process's host has waited for other ranks since it began."""
    return _waited_s[0]


@contextlib.contextmanager
def for_device(device: torch.device) -> Iterator[None]:
    """Records a wait inside the block on a GPU, whose stream waits for other ranks."""
    began = time.perf_counter()
    yield
    if device.type != "cpu":
        _waited_s[0] += time.perf_counter() - began


def install() -> None:
    """Records waits from now on, at a microsecond or two each. Idempotent."""
    works: Any = Work
    works.wait = _noted


def _noted(self: Work, *arguments: Any, **options: Any) -> Any:
    own, began = current_pulse(), time.perf_counter()
    kind = -1
    if own is not None:
        kind = self._get_op_type()  # type: ignore[attr-defined]
        own.begin_wait(kind)
    if (limit := current()) is None:
        result = _plain_wait(self, *arguments, **options)
    else:
        result = limit.wait(_plain_wait, self, *arguments, **options)
    # not after an error: the open wait shows where the rank is stuck
    _waited_s[0] += time.perf_counter() - began
    if own is not None:
        own.end_wait(kind)
    return result
