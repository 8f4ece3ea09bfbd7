"""Standard output that survives a full disk.

The logs of ranks and of Slurm jobs are files, often in the run folder. A line that cannot be written must not end a
run or change its exit code, so it is dropped, and a later line says how many bytes are missing.
"""

from __future__ import annotations

import errno
import io
import sys
from typing import Any, TextIO

_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Output(io.FileIO):
    """File descriptor that accepts writes while its disk is full."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._num_missing_bytes = 0

    def write(self, data: Any) -> int:
        """Writes some of the data, or counts all of it as missing, and returns the number of bytes that are done."""
        try:
            if self._num_missing_bytes:
                super().write(f"[{self._num_missing_bytes} bytes are missing here: the disk was full]\n".encode())
                self._num_missing_bytes = 0
            return super().write(data)
        except OSError as fault:
            if fault.errno not in _FULL:
                raise
            self._num_missing_bytes += len(data)
            return len(data)


def survive_full_disks() -> None:
    """Makes standard output and standard error survive a full disk; call it once, at the start of a process."""
    sys.stdout = _replaced(sys.stdout)
    sys.stderr = _replaced(sys.stderr)


def _replaced(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # not a file, or closed: nothing to survive
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(stream.fileno())),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
