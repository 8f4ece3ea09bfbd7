"""Reading from disks with transient errors.

A network disk that fails over to another server answers EIO, ESTALE or a timeout, and the data a second later. Such
reads are retried with a warning; a lasting error is raised.
"""

import errno
import io
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

TRANSIENT = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ECONNRESET,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
    }
)
"""Numbers of errors that may not occur on the next try."""
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before retries; their sum is about as long as a file server's failover."""


def retried(read: Callable[[], Result], what: object) -> Result:
    """Returns the result of `read`, which is called again after transient errors.

    Args:
        read: Function that reads from the beginning in every call.
        what: Name of the file or object that it reads, for the warnings.

    Raises:
        OSError: `read` failed with another error, or in every try.
    """
    for number, pause_s in enumerate(PAUSES_S, start=1):
        try:
            return read()
        except OSError as fault:
            if fault.errno not in TRANSIENT:
                raise
            text = f"warning: reading {what} failed: {fault.strerror}; try {number} of {len(PAUSES_S)} in {pause_s:g} s"
            _log.warning(text)
        time.sleep(pause_s)
    try:
        return read()
    except OSError as fault:
        if fault.errno in TRANSIENT:
            words = f"{fault.strerror}, in {len(PAUSES_S)} retries as well"
            raise OSError(fault.errno, words, str(what)) from fault
        raise


class SteadyFile(io.RawIOBase):
    """Binary file for reading, which is reopened at the same position after a transient error."""

    def __init__(self, path: Path) -> None:
        """Opens the file.

        Raises:
            OSError: The file cannot be opened.
        """
        super().__init__()
        self._path, self._at = path, 0
        self._file: io.FileIO | None = None
        self._identity: tuple[int, int] | None = None
        retried(self._open, path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves the position and returns it; reads nothing."""
        assert self._identity is not None, "the file was opened"
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._identity[0]}[whence]
        if origin + offset < 0:
            raise OSError(errno.EINVAL, "the position is before the beginning", str(self._path))
        self._at = origin + offset
        if self._file is not None:
            self._file.seek(self._at)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Reads into the buffer and returns the number of bytes; OSError if an error lasts or the file changed."""
        count = retried(lambda: self._read(buffer), self._path)
        self._at += count
        return count

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        super().close()

    def _read(self, buffer: Any) -> int:
        file = self._open()
        try:
            return int(file.readinto(buffer) or 0)
        except OSError:
            # a stale handle stays stale
            self._file = None
            file.close()
            raise

    def _open(self) -> io.FileIO:
        if self._file is not None:
            return self._file
        file = io.FileIO(self._path)
        facts = os.fstat(file.fileno())
        identity = facts.st_size, facts.st_mtime_ns
        if self._identity not in (None, identity):
            file.close()
            raise OSError(errno.EBUSY, "it was changed while it was read", str(self._path))
        file.seek(self._at)
        self._file, self._identity = file, identity
        return file


def steady(path: Path) -> io.BufferedReader:
    """Opens a `SteadyFile` with a buffer, so that a read returns as many bytes as requested.

    Raises:
        OSError: The file cannot be opened.
    """
    return io.BufferedReader(SteadyFile(path))
