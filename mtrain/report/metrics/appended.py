"""Append-only files that survive a full disk.

A full disk must not end a run: entries that cannot be written stay in memory until there is room again. A file holds
only whole entries, in order, each once.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from pathlib import Path
from typing import NamedTuple

from mtrain.base.errors import MachineError
from mtrain.base.files import disk_faults

_log = logging.getLogger(__name__)

MOST_WAITING_BYTES = 64_000_000
"""Limit of waiting data, about 100,000 steps; beyond it the oldest entries are dropped and counted."""


class _Entry(NamedTuple):
    step: int
    data: bytes


class AppendedFile:
    def __init__(self, path: Path, first: bytes = b"", most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        """Opens the file, which may exist, in an existing folder; raises MachineError if that fails. `first` is written
        with the first entry."""
        self._path, self._most_waiting_bytes = path, most_waiting_bytes
        with disk_faults(f"open {path}"):
            self._file = path.open("ab", buffering=0)
            self._size_bytes = os.fstat(self._file.fileno()).st_size
        self._first = first
        self._waiting: deque[_Entry] = deque()
        self._waiting_bytes = 0
        self._dropped: list[int] = []
        self._cause: OSError | None = None
        self._is_torn = False

    def append(self, step: int, data: bytes) -> None:
        """Writes the entry, whole or not at all, after those that wait; if the disk refuses, it waits as well."""
        self._waiting.append(_Entry(step, data))
        self._waiting_bytes += len(data)
        while self._waiting_bytes > self._most_waiting_bytes:
            self._dropped.append(self._taken().step)
        fault = self._flush()
        if fault is not None and self._cause is None:
            _log.warning(
                f"warning: could not write {self._path}: {fault.strerror}; training goes on, what is missing waits"
            )
        elif fault is None and self._cause is not None:
            _log.warning(f"{self._path} has what was waiting for the disk")
        self._cause = fault

    def close(self) -> None:
        """Tries once more, and closes the file."""
        fault = self._flush()
        self._file.close()
        missing = [*self._dropped, *(entry.step for entry in self._waiting)]
        if missing:
            cause = "" if fault is None else f": {fault.strerror}"
            raise MachineError(
                f"{self._path} lacks {len(missing)} records between step {missing[0]} and step {missing[-1]}{cause}; "
                "free space before the next start"
            )

    def _flush(self) -> OSError | None:
        """Writes what waits, in order; returns the error that stopped it."""
        while self._waiting:
            try:
                self._write(self._first + self._waiting[0].data)
            except OSError as fault:
                return fault
            self._first = b""
            self._taken()
        return None

    def _write(self, data: bytes) -> None:
        """Writes all of the data or, if the disk refuses, nothing."""
        if self._is_torn:
            self._take_back()
        rest = data
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._is_torn = True
            with contextlib.suppress(OSError):  # then the next attempt begins with it
                self._take_back()
            raise
        self._size_bytes += len(data)

    def _take_back(self) -> None:
        """Removes a partial entry at the end of the file."""
        self._file.truncate(self._size_bytes)
        self._is_torn = False

    def _taken(self) -> _Entry:
        entry = self._waiting.popleft()
        self._waiting_bytes -= len(entry.data)
        return entry
