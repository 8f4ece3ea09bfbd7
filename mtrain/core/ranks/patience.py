"""Waits for other ranks: limits how long they last, without suspensions, and records how long they took.

gloo measures its timeouts by a clock that continues while a job is suspended, so after a suspension longer than the
timeout every open wait would fail at once. Therefore gloo's timeouts are set too high to be reached, and a thread,
which is suspended with its process, counts how long each wait has lasted. If a wait takes too long, the thread shuts
down the connections of all groups, which ends all waits of this and the other ranks, just like gloo's timeout.

Every collective and every message of torch.distributed ends in `Work.wait`. On CPUs the host waits there; on GPUs the
stream waits, and the host only when it reads a number.
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
"""Longest gap between two polls that counts as waiting, in polls; in a longer gap the process was suspended."""
_DESCRIPTORS = Path("/proc/self/fd")


class Patience:
    """Limit on the waits of this process for other ranks; `limited` starts the thread that counts."""

    def __init__(self, limit_s: float) -> None:
        shortest, longest = _POLL_S
        self._limit_s, self._poll_s = limit_s, min(max(limit_s / _POLLS_PER_LIMIT, shortest), longest)
        self._sockets: dict[int, str] = {}
        self._waits: dict[int, object] = {}
        """Current waits by thread, each a unique object."""
        self._is_over, self.ended = False, threading.Event()

    def take(self, sockets: dict[int, str], groups: Iterable[dist.ProcessGroup]) -> None:
        """Applies this limit instead of gloo's timeout to groups, if they opened any of the sockets, which are given as
        descriptor -> name."""
        connected = {descriptor: name for descriptor, name in sockets.items() if _is_connected(descriptor)}
        if connected:
            self._sockets |= connected
            set_timeouts(groups, _NEVER)

    def wait(self, plain: Callable[..., Any], work: Any, *arguments: Any, **options: Any) -> Any:
        """Waits for a collective or a message by `plain`, torch's method; raises RuntimeError after the limit."""
        try:
            with self.counted():
                # without _NEVER a message would keep the timeout with which its group was opened
                return plain(work, *arguments, **options) if arguments or options else plain(work, _NEVER)
        except RuntimeError as error:
            if not self._is_over:
                raise
            raise RuntimeError(f"Timed out waiting {self._limit_s:g} s for another rank") from error

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the time of this thread inside the block as a wait."""
        thread = threading.get_ident()
        self._waits[thread] = object()
        try:
            yield
        finally:
            del self._waits[thread]

    def count(self) -> None:
        """Counts until `ended` is set or a wait has taken too long."""
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
        open_sockets = _sockets()
        for descriptor, name in self._sockets.items():
            if open_sockets.get(descriptor) == name:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


_current: list[Patience] = []


def current() -> Patience | None:
    """Returns the limit of the world that this process has opened; None if its groups use their own timeouts."""
    return _current[-1] if _current else None


@contextlib.contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Limits, inside the block, every wait of groups opened in `opening`, in seconds without suspensions."""
    limit = Patience(limit_s)
    thread = threading.Thread(target=limit.count, name="patience", daemon=True)
    thread.start()
    _current.append(limit)
    try:
        yield
    finally:
        _current.remove(limit)
        limit.ended.set()
        thread.join()


@contextlib.contextmanager
def opening() -> Iterator[None]:
    """Applies the limit of the enclosing `limited` to groups opened inside the block."""
    if (limit := current()) is None:
        yield
        return
    sockets, groups = _sockets().items(), set(dist.distributed_c10d._world.pg_map)
    yield
    new = {descriptor: name for descriptor, name in _sockets().items() if (descriptor, name) not in sockets}
    limit.take(new, set(dist.distributed_c10d._world.pg_map) - groups)


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Counts the time of this thread inside the block, for example to close groups, as a wait."""
    limit = current()
    with contextlib.nullcontext() if limit is None else limit.counted():
        yield


def set_timeouts(groups: Iterable[dist.ProcessGroup], timeout: timedelta) -> None:
    """Sets the timeout by which the backends of these groups limit collectives."""
    # public since torch 2.15, which warns about the old name
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in groups:
        set_timeout(timeout, group)


def _sockets() -> dict[int, str]:
    """Returns the unique names of all open sockets of this process by descriptor."""
    sockets = {}
    with contextlib.suppress(OSError):
        for link in _DESCRIPTORS.iterdir():
            with contextlib.suppress(OSError):
                if (name := os.readlink(link)).startswith("socket:"):
                    sockets[int(link.name)] = name
    return sockets


def _is_connected(descriptor: int) -> bool:
    """Says whether a socket is a network connection to another process, rather than one that listens."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.getpeername()
        return connection.family in (socket.AF_INET, socket.AF_INET6)
    return False


_waited_s = [0.0]
_plain_wait = Work.wait


def waited_s() -> float:
    """Returns the seconds that this host has waited for other ranks since the process began."""
    return _waited_s[0]


@contextlib.contextmanager
def for_device(device: torch.device) -> Iterator[None]:
    """Records the time inside the block as a wait on GPUs, where reading a number waits for other ranks."""
    began = time.perf_counter()
    yield
    if device.type != "cpu":
        _waited_s[0] += time.perf_counter() - began


def install() -> None:
    """Records waits from now on; costs a microsecond or two each. Idempotent."""
    works: Any = Work
    works.wait = _timed_wait


def _timed_wait(self: Work, *arguments: Any, **options: Any) -> Any:
    pulse, began = current_pulse(), time.perf_counter()
    kind = -1
    if pulse is not None:
        kind = self._get_op_type()  # type: ignore[attr-defined]
        pulse.begin_wait(kind)
    if (limit := current()) is None:
        result = _plain_wait(self, *arguments, **options)
    else:
        result = limit.wait(_plain_wait, self, *arguments, **options)
    # not in a `finally`: after an error the open wait shows where the rank was stuck
    _waited_s[0] += time.perf_counter() - began
    if pulse is not None:
        pulse.end_wait(kind)
    return result
