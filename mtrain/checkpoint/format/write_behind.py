"""Writing that the disk takes part in from the beginning."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

_SYNC_BYTES = 1 << 26
"""After so many bytes the disk is asked to begin."""


class WriteBehind:
    """Asks the disk, in a thread, to take what has been written to a file so far, so that little is left for the end.

    It promises nothing: what has to be on disk is synced when it is complete. A `with` block waits at its end: what the
    disk refused to a sync here, it does not say again to a file that is opened later.
    """

    def __init__(self, descriptor: int) -> None:
        """
        Args:
            descriptor: Of the file; open as long as this is.
        """
        self._descriptor, self._new_bytes = descriptor, 0
        # at most one sync is under way, so none waits for the worker
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="write-behind")
        self._syncing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is None:
            self.wait()

    def note(self, num_bytes: int) -> None:
        """So many more have been written.

        Raises:
            OSError: The disk has refused earlier ones.
        """
        self._new_bytes += num_bytes
        if self._new_bytes >= _SYNC_BYTES and (self._syncing is None or self._syncing.done()):
            self.wait()
            self._new_bytes = 0
            # never waited for here: where the disk is slow, the next one covers more bytes
            self._syncing = self._worker.submit(os.fdatasync, self._descriptor)

    def wait(self) -> None:
        """Until nothing is under way.

        Raises:
            OSError: The disk refuses.
        """
        if self._syncing is not None:
            self._syncing.result()

    def close(self) -> None:
        """Ends the thread; what is under way comes to its end first."""
        self._worker.shutdown()
