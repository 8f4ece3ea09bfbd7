"""One run in a run folder: a lock on a file, and a name in it.

Where the file system has no locks (ENOLCK, ENOSYS, EOPNOTSUPP: some NFS and Lustre mounts) the name must do. The run
marks the file every few seconds, and a start that finds another name watches for a while whether anyone still does.
Two starts that miss each other nevertheless write their names after one another; the one whose name is gone stops
before it publishes anything. Of two starts that both believe they hold the folder, the one with the higher number does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mtrain.base.errors import MachineError, RunFolderError
from mtrain.base.files import LockOutcome, disk_faults, try_lock

_OWNER_BYTES = 1000
_POLL_S = 0.1
_CHECK_S = 1.0


class Patience(NamedTuple):
    """Times where there are no locks."""

    beat_s: float = 5.0
    """Between two marks."""
    watch_s: float = 20.0
    """A run that has not marked the file for so long is dead, or loses the folder."""
    settle_s: float = 1.0
    """In which the names of two starts at the same moment arrive."""


@dataclass(frozen=True)
class RunLock:
    """Proof that this process is the folder's one run."""

    file: Path
    owner: str
    """The text that this process left in the lock file; no two runs share one."""
    number: int = 0
    """Of this start of the run; of two that both hold the folder the higher one has it."""
    checked: list[float] = field(default_factory=lambda: [time.monotonic()], compare=False)
    """One number: when the name was last seen there."""

    def check(self) -> None:
        """To be called before anything is published.

        Where nodes do not see each other's locks (some network file systems), or where the file system has given the
        lock of a node that it lost to another one, a run that was started elsewhere in the meantime has put its own
        name into the lock file; the older one stops here. The file is opened anew, so that a network file system asks
        its server.

        Raises:
            RunFolderError: the folder belongs to another run now.
        """
        with disk_faults(f"read {self.file}"):
            owner = _owner(self.file)
        if owner != self.owner and 0 < _number_in(owner) < self.number:
            # an older start was held up between taking the lock and writing its name: it has to go, not we
            with disk_faults(f"write {self.file}"):
                _put_name(self.file, self.owner)
                owner = _owner(self.file)
        self.checked[0] = time.monotonic()
        if owner != self.owner:
            raise RunFolderError(
                f"run folder {self.file.parent} was taken over by {owner.strip()}; this run ({self.owner.strip()}) "
                "stops without writing to it again"
            )

    def check_now_and_then(self) -> None:
        """As `check`, where a second has passed since the last one: for what is written at every step.

        A process that was stopped for longer than that, as long as it takes to lose the folder, looks first of all. A
        disk that does not answer says nothing of the folder: what is written next looks again.
        """
        if time.monotonic() - self.checked[0] > _CHECK_S:
            with contextlib.suppress(MachineError):
                self.check()


@contextmanager
def locked(
    file: Path,
    patience: Patience = Patience(),  # noqa: B008
    numbered: Callable[[], int] = lambda: 0,
) -> Iterator[RunLock]:
    """Keeps other runs out inside the `with` block; the file's folder must exist.

    The lock belongs to this process and ends with it, however it dies; children made by fork do not hold it.

    Args:
        file: The lock file.
        patience: Where the file system has no locks.
        numbered: Called once nobody else works here; gives the number of this start.

    Raises:
        RunFolderError: another process works here; names it.
        MachineError: the lock file cannot be written.
    """
    with disk_faults(f"lock {file.parent}"):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    _held.add(descriptor)
    try:
        with contextlib.ExitStack() as marked:
            with disk_faults(f"lock {file.parent}"):
                outcome = try_lock(descriptor, fcntl.LOCK_EX)
                if outcome is LockOutcome.BUSY:
                    raise _in_use(file, _owner(file))
                if outcome is LockOutcome.UNSUPPORTED:
                    _warn(file, patience)
                    _watch(file, patience)
                number = numbered()
                lock = RunLock(file, _this_process(number), number)
                _sign(descriptor, lock.owner)
            if outcome is LockOutcome.UNSUPPORTED:
                marked.enter_context(_marked(lock, patience))
            yield lock
    finally:
        if descriptor in _held:  # not in a forked child, which let go when it began
            _held.discard(descriptor)
            with contextlib.suppress(OSError):  # where there are no locks
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def refuse_if_held(file: Path) -> None:
    """Looks whether a run works in a folder, and leaves it as it is; says nothing where there are no locks.

    Args:
        file: The lock file.

    Raises:
        RunFolderError: Another process works here; names it.
        MachineError: The file cannot be read.
    """
    with disk_faults(f"lock {file.parent}"):
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            # shared, so that two that look do not see each other
            if try_lock(descriptor, fcntl.LOCK_SH) is LockOutcome.BUSY:
                raise _in_use(file, _owner(file))
        finally:
            os.close(descriptor)


def _sign(descriptor: int, owner: str) -> None:
    """Puts the name over the one before, so that a full disk takes it."""
    os.pwrite(descriptor, owner.encode(), 0)
    os.ftruncate(descriptor, len(owner.encode()))
    os.fsync(descriptor)


def _warn(file: Path, patience: Patience) -> None:
    print(
        f"warning: the file system of {file.parent} has no file locks; another start is refused as long as this run "
        f"marks {file.name}, every {patience.beat_s:g} s",
        file=sys.stderr,
        flush=True,
    )


def _watch(file: Path, patience: Patience) -> None:
    """Returns when nobody has marked the file for long enough, or its last run has signed off.

    Raises:
        RunFolderError: A run marks it.
    """
    first = _mark(file)
    if not first.owner.strip():
        return
    print(f"watching for {patience.watch_s:g} s whether {first.owner.strip()} still runs", flush=True)
    end = time.monotonic() + patience.watch_s
    while time.monotonic() < end:
        if not (now := _mark(file)).owner.strip():
            return
        if now != first:
            raise _in_use(file, now.owner)
        time.sleep(_POLL_S)


class _Mark(NamedTuple):
    owner: str
    time_ns: int
    """Of the file system's clock, compared with itself only."""


def _mark(file: Path) -> _Mark:
    with file.open("rb", buffering=0) as opened:  # a network file system looks again at what is opened again
        return _Mark(_text(opened.read(_OWNER_BYTES)), os.fstat(opened.fileno()).st_mtime_ns)


@contextmanager
def _marked(lock: RunLock, patience: Patience) -> Iterator[None]:
    """Marks the file as long as the name in it is ours; takes the name away at the end.

    Raises:
        RunFolderError: another start has put its name over ours at once.
    """
    done = threading.Event()

    def beat() -> None:
        while not done.wait(patience.beat_s):
            with contextlib.suppress(OSError):  # the next one may come through
                if _owner(lock.file) != lock.owner:
                    return
                os.utime(lock.file)

    threading.Thread(target=beat, name="mark-run-folder", daemon=True).start()
    try:
        time.sleep(patience.settle_s)
        lock.check()
        yield
    finally:
        done.set()
        with contextlib.suppress(OSError):  # the next start then watches for a while
            if _owner(lock.file) == lock.owner:
                os.truncate(lock.file, 0)


def _owner(file: Path) -> str:
    with file.open("rb", buffering=0) as opened:
        return _text(opened.read(_OWNER_BYTES))


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _in_use(file: Path, owner: str) -> RunFolderError:
    who = owner.strip() or "a process that has not said who"
    return RunFolderError(
        f"run folder {file.parent} is in use by {who}; wait until that run has ended, or set another run.dir"
    )


def _this_process(number: int) -> str:
    """Who this is, for people, the number of the start, and a token that makes it unique."""
    job = os.environ.get("SLURM_JOB_ID")
    where = f"process {os.getpid()} on {socket.gethostname()}" + (f", Slurm job {job}" if job else "")
    return f"{where}{f' (start {number})' if number else ''} [{secrets.token_hex(8)}]\n"


def _number_in(owner: str) -> int:
    """That a name holds; 0 where it has none, as older versions write it."""
    found = re.search(r" \(start (\d+)\) \[\w+\]$", owner.strip())
    return int(found[1]) if found else 0


def _put_name(file: Path, owner: str) -> None:
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        _sign(descriptor, owner)
    finally:
        os.close(descriptor)


_held: set[int] = set()
"""Descriptors of held locks. A forked child inherits them and, outliving its parent, would keep the folder locked."""


def _let_go_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
