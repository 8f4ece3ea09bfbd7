"""Mutual exclusion of runs in a run folder: a lock on a file, and the owner's name in it.

On file systems without locks (ENOLCK, ENOSYS, EOPNOTSUPP: some NFS and Lustre mounts) only the name protects the
folder. The run touches the file every few seconds, and a start that finds another name watches the file for a while. If
two starts miss each other nevertheless, the later name overwrites the earlier one, and the run whose name is gone stops
before it publishes anything. Of two starts that both believe they hold the folder, the higher number wins.
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mtrain.base.errors import MachineError, RunFolderError
from mtrain.base.files import LockOutcome, disk_faults, try_lock

_log = logging.getLogger(__name__)

_OWNER_BYTES = 1000
_POLL_S = 0.1
_CHECK_S = 1.0


class Patience(NamedTuple):
    """Times in seconds, which only matter on file systems without locks."""

    beat_s: float = 5.0
    """Time between two marks, which touch the file."""
    watch_s: float = 20.0
    """Time without a mark after which a run counts as dead."""
    settle_s: float = 1.0
    """Time until the names of simultaneous starts become visible."""


@dataclass(frozen=True)
class RunLock:
    """Proof that this process belongs to the folder's only run."""

    file: Path
    owner: str
    """Text that this process wrote into the lock file; unique."""
    number: int = 0
    """Number of this start; of two starts that hold the folder, the higher number wins."""
    checked: list[float] = field(default_factory=lambda: [time.monotonic()], compare=False)
    """List with one element: the monotonic time at which the name was last seen in the file."""

    def check(self) -> None:
        """Checks that the folder still belongs to this run; call it before publishing anything.

        Nodes may not see each other's locks, or the file system may have given the lock of an unreachable node to
        another one. A run that started elsewhere has then put its name into the lock file, and the older run stops
        here. The file is reopened, so that a network file system asks its server.
        """
        with disk_faults(f"read {self.file}"):
            owner = _owner(self.file)
        if owner != self.owner and 0 < _number_in(owner) < self.number:
            # an older start was delayed between taking the lock and writing its name; that start has to stop
            with disk_faults(f"write {self.file}"):
                with self.file.open("r+b", buffering=0) as opened:
                    _sign(opened.fileno(), self.owner)
                owner = _owner(self.file)
        self.checked[0] = time.monotonic()
        if owner != self.owner:
            raise RunFolderError(
                f"run folder {self.file.parent} was taken over by {owner.strip()}; this run ({self.owner.strip()}) "
                "stops without writing to it again"
            )

    def check_now_and_then(self) -> None:
        """Calls `check` if the last check was more than a second ago; for files that are written at every step.

        So a process that was suspended long enough to lose the folder checks before its next write. A disk error proves
        nothing about the folder; the next write checks again.
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

    The lock ends with this process, even if it is killed; forked children do not hold it.

    Args:
        numbered: Called after the lock is taken; returns the number of this start.

    Raises:
        RunFolderError: Another process uses the folder; the message names it.
    """
    with disk_faults(f"lock {file.parent}"):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    _locked_descriptors.add(descriptor)
    try:
        with contextlib.ExitStack() as marked:
            with disk_faults(f"lock {file.parent}"):
                outcome = try_lock(descriptor, fcntl.LOCK_EX)
                if outcome is LockOutcome.BUSY:
                    raise _in_use(file, _owner(file))
                if outcome is LockOutcome.UNSUPPORTED:
                    _log.warning(
                        f"warning: the file system of {file.parent} has no file locks; another start is refused as "
                        f"long as this run marks {file.name}, every {patience.beat_s:g} s"
                    )
                    _watch(file, patience)
                number = numbered()
                lock = RunLock(file, _this_process(number), number)
                _sign(descriptor, lock.owner)
            if outcome is LockOutcome.UNSUPPORTED:
                marked.enter_context(_marked(lock, patience))
            yield lock
    finally:
        if descriptor in _locked_descriptors:  # not in a forked child, which closed it at once
            _locked_descriptors.discard(descriptor)
            with contextlib.suppress(OSError):  # on a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def refuse_if_held(file: Path) -> None:
    """Refuses a folder that a run uses, without changing it; on file systems without locks it finds no run."""
    with disk_faults(f"lock {file.parent}"):
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            # shared, so that two checking processes do not block each other
            if try_lock(descriptor, fcntl.LOCK_SH) is LockOutcome.BUSY:
                raise _in_use(file, _owner(file))
        finally:
            os.close(descriptor)


def _sign(descriptor: int, owner: str) -> None:
    """Overwrites the name in the file, which works even on a full disk."""
    os.pwrite(descriptor, owner.encode(), 0)
    os.ftruncate(descriptor, len(owner.encode()))
    os.fsync(descriptor)


def _watch(file: Path, patience: Patience) -> None:
    """Waits until the file has not been marked for long enough, or its last run has removed its name."""
    first = _mark(file)
    if not first.owner.strip():
        return
    _log.info(f"watching for {patience.watch_s:g} s whether {first.owner.strip()} still runs")
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
    """Modification time by the file system's clock; only compared with other times of that clock."""


def _mark(file: Path) -> _Mark:
    with file.open("rb", buffering=0) as opened:  # reopened, so that a network file system asks its server
        owner = opened.read(_OWNER_BYTES).decode(errors="replace")
        return _Mark(owner, os.fstat(opened.fileno()).st_mtime_ns)


def _owner(file: Path) -> str:
    return _mark(file).owner


@contextmanager
def _marked(lock: RunLock, patience: Patience) -> Iterator[None]:
    """Marks the file while it contains our name; removes the name at the end."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(patience.beat_s):
            with contextlib.suppress(OSError):  # the next mark may succeed
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
        with contextlib.suppress(OSError):  # otherwise the next start watches for a while
            if _owner(lock.file) == lock.owner:
                os.truncate(lock.file, 0)


def _in_use(file: Path, owner: str) -> RunFolderError:
    who = owner.strip() or "an unknown process"
    return RunFolderError(
        f"run folder {file.parent} is in use by {who}; wait until that run has ended, or set another run.dir"
    )


def _this_process(number: int) -> str:
    """Returns a readable name with process, host, job and start number, and a token that makes it unique."""
    job = os.environ.get("SLURM_JOB_ID")
    where = f"process {os.getpid()} on {socket.gethostname()}" + (f", Slurm job {job}" if job else "")
    return f"{where}{f' (start {number})' if number else ''} [{secrets.token_hex(8)}]\n"


def _number_in(owner: str) -> int:
    """Returns the start number in an owner's name; 0 in names of older versions."""
    match = re.search(r" \(start (\d+)\) \[\w+\]$", owner.strip())
    return int(match[1]) if match else 0


_locked_descriptors: set[int] = set()
"""Descriptors of held locks, which forked children close; a child that outlives its parent would keep it locked."""


def _release_in_child() -> None:
    for descriptor in _locked_descriptors:
        os.close(descriptor)
    _locked_descriptors.clear()


os.register_at_fork(after_in_child=_release_in_child)
