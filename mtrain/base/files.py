"""Crash-safe file operations: atomic writes, synced folders, locks, and readable disk errors."""

import enum
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtrain.base.errors import MachineError


@contextmanager
def disk_faults(doing: str) -> Iterator[None]:
    """Turns an OSError of the block into a MachineError.

    Args:
        doing: Attempted action, as the words after "could not": "write the run folder /a/b".

    Raises:
        MachineError: The block raised an OSError.
    """
    try:
        yield
    except OSError as fault:
        where = f" ({fault.filename})" if fault.filename else ""
        cause = f"{fault.strerror or fault}{where}"
        raise MachineError(
            f"could not {doing}: {cause}; free space, fix the permissions or choose another path"
        ) from fault


def sync_folder(path: Path) -> None:
    """Waits until the folder's list of names is on disk; the content of its files may not be."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sync_file(path: Path) -> None:
    """Waits until the file's content is on disk; any process may have written it."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a new file that replaces `path` atomically at the end of the block.

    If the block raises, the old file stays. A crash can leave a file named `.new-*`.
    """
    new = path.with_name(f".new-{path.name}-{os.urandom(4).hex()}")
    try:
        yield new
        sync_file(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Writes a UTF-8 file atomically and waits until it is on disk."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """Deletes a file, a link (not its target), or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


class LockOutcome(enum.Enum):
    TAKEN = enum.auto()
    BUSY = enum.auto()
    UNSUPPORTED = enum.auto()
    """The file system does not support locks (some NFS and Lustre mounts), so nothing is locked."""


def try_lock(descriptor: int, kind: int) -> LockOutcome:
    """Tries to take a `flock` lock without waiting.

    Args:
        descriptor: Open file; closing it releases the lock.
        kind: fcntl.LOCK_SH or fcntl.LOCK_EX.

    Raises:
        OSError: The operating system fails for another reason.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return LockOutcome.BUSY
    except OSError as fault:
        if fault.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return LockOutcome.UNSUPPORTED
    return LockOutcome.TAKEN
