"""metrics.jsonl: the authoritative record of a run; every other view can be made from it."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults, replacing
from mtrain.base.plain_files import open_plain_file
from mtrain.report.metrics.appended import AppendedFile
from mtrain.report.metrics.record import ChangeRecord, Record, StepRecord, from_json_line, to_json_line

_log = logging.getLogger(__name__)

_LONGEST_LINE = 1 << 20
"""Longest line in characters; a record of a hundred terms has 20,000."""


class JsonlSink:
    """Appends one line per record; written lines stay readable if the process is killed.

    A resumed run continues the file: opening it at step k removes what an earlier start wrote beyond k.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        """Opens the file for the step after `resume_step`; see `rewind`."""
        rewind(path, resume_step)
        self._file = AppendedFile(path)

    def write(self, record: Record) -> None:
        """Writes the record at once; it waits if the disk refuses."""
        self._file.append(record.step, to_json_line(record).encode())

    def close(self) -> None:
        """Closes the file; raises MachineError if the disk has refused records to the end."""
        self._file.close()


def rewind(path: Path, resume_step: int) -> None:
    """Removes records beyond `resume_step`, in one move, and a partial line at the end.

    A run that starts at step 0 keeps nothing: its validation before the first step is repeated as well. A warning tells
    the user if steps are missing, because an earlier start ended before the disk accepted them.
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
            if _is_kept(record, resume_step):
                file.write(line)
                num_steps += isinstance(record, StepRecord)
    if num_steps < resume_step:
        text = f"warning: {path} lacks {resume_step - num_steps} of the {resume_step} steps before this start"
        _log.warning(text)


def _is_kept(record: Record, resume_step: int) -> bool:
    if isinstance(record, ChangeRecord):
        # a change at this very step belongs to a start that saved nothing with it; this start writes its own
        return record.step < resume_step
    return 0 < resume_step >= record.step


def read_records(path: Path) -> Iterator[Record]:
    """Yields records in file order; an unfinished last line is ignored. Raises DataError for a damaged line."""
    return (record for _, record in _whole_lines(path))


def last_step(path: Path) -> int:
    """Returns the last step in the file; 0 without one."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * _LONGEST_LINE))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(DataError, UnicodeDecodeError):
            record = from_json_line(line.decode())
            if isinstance(record, StepRecord):
                return record.step
    return 0


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
                    raise DataError(f"longer than {_LONGEST_LINE} characters, which no record of this program is")
                yield line, from_json_line(line)
            except DataError as fault:
                raise DataError(f"{path}, line {number}: {fault}; repair or remove that line") from fault
