"""Reading from disks that fail for a moment.

A network disk that changes its server answers EIO, ESTALE or a timeout, and a second later the data. Such reads are
tried again, with a line each time; what has failed for good ends in the error of before.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

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
"""Error numbers that a later try may not meet."""
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Before each further try; about what a file server takes to be taken over."""


def retried(read: Callable[[], Result], what: object) -> Result:
    """What `read` gives, which is called again where it fails for a moment.

    Args:
        read: Reads from the beginning whenever it is called.
        what: It reads, for the lines that tell of it.

    Raises:
        OSError: As `read`; of a fault that lasts, the last one.
    """
    for number, pause_s in enumerate(PAUSES_S, start=1):
        try:
            return read()
        except OSError as fault:
            if fault.errno not in TRANSIENT:
                raise
            text = f"warning: reading {what} failed: {fault.strerror}; try {number} of {len(PAUSES_S)} in {pause_s:g} s"
            print(text, file=sys.stderr, flush=True)
        time.sleep(pause_s)
    try:
        return read()
    except OSError as fault:
        if fault.errno in TRANSIENT:
            words = f"{fault.strerror}, in {len(PAUSES_S)} further tries, too"
            raise OSError(fault.errno, words, str(what)) from fault
        raise


class SteadyFile(io.RawIOBase):
    """A file to be read; after a fault it is opened again where it was."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: Of the file.

        Raises:
            OSError: It cannot be opened.
        """
        super().__init__()
        self._path, self._at = path, 0
        self._file: io.FileIO | None = None
        self._identity: tuple[int, int] | None = None
        retried(self._open, path)

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of files; reads nothing, so nothing can fail but an impossible place."""
        assert self._identity is not None, "it was opened"
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._identity[0]}[whence]
        if origin + offset < 0:
            raise OSError(errno.EINVAL, "there is nothing before the beginning", str(self._path))
        self._at = origin + offset
        if self._file is not None:
            self._file.seek(self._at)
        return self._at

    def tell(self) -> int:
        """Where the next byte is read, in bytes."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As of files; OSError where a fault lasts, or the file is another one now."""
        count = retried(lambda: self._read(buffer), self._path)
        self._at += count
        return count

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        super().close()

    def _read(self, buffer: Any) -> int:
        file = self._open()
        try:
            return int(file.readinto(buffer) or 0)
        except OSError:
            # a handle that is stale stays so
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
    """A `SteadyFile` that gives as many bytes as are asked for, as libraries expect.

    Raises:
        OSError: It cannot be opened.
    """
    return io.BufferedReader(SteadyFile(path))
