"""metrics.jsonl: the authoritative record of a run, from which every other view can be made.

A full disk must not end a run: entries that cannot be written stay in memory until the disk has room. A file holds only
whole entries, in order, each once.
"""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mtrain.base.errors import DataError, MachineError
from mtrain.base.files import disk_faults, replacing
from mtrain.base.plain_files import open_plain_file
from mtrain.base.spelling import counted
from mtrain.report.metrics.record import ChangeRecord, Record, StepRecord, from_json_line, to_json_line

_log = logging.getLogger(__name__)

_LONGEST_LINE = 1 << 20
"""Longest line in characters; a record of a hundred terms has 20,000."""
MOST_WAITING_BYTES = 64_000_000
"""Limit of waiting data, about 100,000 steps; beyond it the oldest entries are dropped and counted."""


class _Entry(NamedTuple):
    step: int
    data: bytes


class AppendedFile:
    def __init__(self, path: Path, first: bytes = b"", most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        """Opens a file in an existing folder; raises MachineError if it cannot. `first` precedes the first entry."""
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
        """Writes the waiting entries and then this one, whole or not at all; if the disk refuses, the entry waits."""
        self._waiting.append(_Entry(step, data))
        self._waiting_bytes += len(data)
        while self._waiting_bytes > self._most_waiting_bytes:
            self._dropped.append(self._popped().step)
        fault = self._flush()
        if fault is not None and self._cause is None:
            _log.warning(
                f"warning: could not write {self._path}: {fault.strerror}; training continues, the records wait"
            )
        elif fault is None and self._cause is not None:
            _log.warning(f"{self._path} has what was waiting for the disk")
        self._cause = fault

    def close(self) -> None:
        fault = self._flush()
        self._file.close()
        missing = [*self._dropped, *(entry.step for entry in self._waiting)]
        if missing:
            cause = "" if fault is None else f": {fault.strerror}"
            raise MachineError(
                f"{self._path} lacks {counted(len(missing), 'record')} between step {missing[0]} and step "
                f"{missing[-1]}{cause}; free space before the next start"
            )

    def _flush(self) -> OSError | None:
        """Writes what waits, in order; returns the error that stopped it."""
        while self._waiting:
            try:
                self._write(self._first + self._waiting[0].data)
            except OSError as fault:
                return fault
            self._first = b""
            self._popped()
        return None

    def _write(self, data: bytes) -> None:
        """Writes all of the data or, if the disk refuses, nothing."""
        if self._is_torn:
            self._remove_partial()
        remaining = data
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError:
            self._is_torn = True
            with contextlib.suppress(OSError):  # if this fails, the next attempt begins with it
                self._remove_partial()
            raise
        self._size_bytes += len(data)

    def _remove_partial(self) -> None:
        """Removes a partial entry at the end of the file."""
        self._file.truncate(self._size_bytes)
        self._is_torn = False

    def _popped(self) -> _Entry:
        entry = self._waiting.popleft()
        self._waiting_bytes -= len(entry.data)
        return entry


class JsonlSink:
    """Appends one line per record; written lines stay readable if the process is killed."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """Opens the file for the step after `resume_step`; see `rewind`."""
        rewind(path, resume_step)
        self._file = AppendedFile(path)

    def write(self, record: Record) -> None:
        self._file.append(record.step, to_json_line(record).encode())

    def close(self) -> None:
        """Closes the file; raises MachineError if the disk has refused records to the end."""
        self._file.close()


def rewind(path: Path, resume_step: int) -> None:
    """Atomically removes records after `resume_step` and a partial last line; warns if steps are missing.

    A run that starts at step 0 keeps nothing, because it also repeats the validation before the first step.
    """
    if not path.exists():
        return
    num_steps = 0
    with (
        disk_faults(f"rewind {path} to step {resume_step}"),
        replacing(path) as new,
        new.open("w", encoding="utf-8") as file,
    ):
        for line, record in _whole_lines(path):
            # a change at this step belongs to a start that saved nothing afterwards; this start writes its own
            is_kept = resume_step > 0 and record.step <= resume_step - isinstance(record, ChangeRecord)
            if is_kept:
                file.write(line)
                num_steps += isinstance(record, StepRecord)
    if num_steps < resume_step:
        text = (
            f"warning: {path} lacks {resume_step - num_steps} of the {counted(resume_step, 'step')} before this start"
        )
        _log.warning(text)


def read_records(path: Path) -> Iterator[Record]:
    """Yields records in file order and ignores an unfinished last line. Raises DataError for a damaged line."""
    return (record for _, record in _whole_lines(path))


def read_tail(path: Path, num_bytes: int = 2 * _LONGEST_LINE) -> Iterator[Record]:
    """Yields the records in the last `num_bytes` of a file, the latest first; skips lines that it cannot read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        with contextlib.suppress(DataError, UnicodeDecodeError):
            yield from_json_line(line.decode())


def last_step(path: Path) -> int:
    """Returns the last step in the file; 0 if it has none."""
    return next((record.step for record in read_tail(path) if isinstance(record, StepRecord)), 0)


def _whole_lines(path: Path) -> Iterator[tuple[str, Record]]:
    with (
        open_plain_file(path) as plain,
        open(plain.fileno(), encoding="utf-8", errors="replace", closefd=False) as file,
    ):
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), ""), start=1):
            if not line.endswith("\n") and len(line) < _LONGEST_LINE:
                return
            try:
                if not line.endswith("\n"):
                    raise DataError(f"longer than {_LONGEST_LINE} characters, unlike any record of this program")
                yield line, from_json_line(line)
            except DataError as fault:
                raise DataError(f"{path}, line {number}: {fault}; repair or remove that line") from fault
