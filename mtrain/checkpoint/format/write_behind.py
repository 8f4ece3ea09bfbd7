"""Early writeback: the disk starts to write while a file is still being produced."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

_BEGIN_BYTES = 1 << 24
"""Number of new bytes after which the disk is asked to begin."""
_SYNC_FILE_RANGE_WRITE = 2
"""Flag of Linux' `sync_file_range` that begins to write the range and waits for nothing."""
_NOT_POSSIBLE = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP)
"""Error numbers of a kernel, file system or file without this call; then the final sync has to write everything."""


class WriteBehind:
    """Asks the disk, in a thread, to write what a file has so far, so that little is left for the end.

    The file is written from its beginning. Nothing is guaranteed: the caller syncs the complete file, which also
    reports what the disk refused meanwhile. A `with` block waits at its end.
    """

    def __init__(self, descriptor: int) -> None:
        """
        Args:
            descriptor: Descriptor of the file; must stay open as long as this object.
        """
        self._descriptor, self._begun_bytes, self._new_bytes = descriptor, 0, 0
        # at most one request is under way, so none waits for the worker
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="write-behind")
        self._asking: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is None:
            self.wait()

    def note(self, num_bytes: int) -> None:
        """Counts bytes that have been written to the file, and starts their writeback where enough have come.

        Raises:
            OSError: The disk has refused earlier bytes.
        """
        self._new_bytes += num_bytes
        if self._new_bytes >= _BEGIN_BYTES and (self._asking is None or self._asking.done()):
            self.wait()
            # never waited for here: where the disk is slow, the next request covers more bytes
            self._asking = self._worker.submit(begin_writing, self._descriptor, self._begun_bytes, self._new_bytes)
            self._begun_bytes, self._new_bytes = self._begun_bytes + self._new_bytes, 0

    def wait(self) -> None:
        """Waits until no request is under way.

        Raises:
            OSError: The disk refuses.
        """
        if self._asking is not None:
            self._asking.result()

    def close(self) -> None:
        """Ends the thread after the request that is under way."""
        self._worker.shutdown()


def begin_writing(descriptor: int, start: int, num_bytes: int) -> None:
    """Starts the writeback of a range of a file; returns once all of it is queued, not when it is on disk.

    Unlike fdatasync it commits no journal and flushes no cache of the disk; only the end needs these.

    Raises:
        OSError: The disk refuses.
    """
    if sys.platform != "linux":  # other systems have no such call, and the final sync writes everything
        return
    library = ctypes.CDLL(None, use_errno=True)
    if library.sync_file_range(
        descriptor, ctypes.c_int64(start), ctypes.c_int64(num_bytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
    ):
        number = ctypes.get_errno()
        if number not in _NOT_POSSIBLE:
            raise OSError(number, os.strerror(number))
