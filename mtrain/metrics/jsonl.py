"""metrics.jsonl: the truth about a run, from which every other view can be drawn again."""

from collections.abc import Iterator
from pathlib import Path

from mtrain.errors import DataError
from mtrain.files import disk_faults, replacing
from mtrain.metrics.record import Record, from_json_line, to_json_line


class JsonlSink:
    """Appends one line a record; a line that was written stays readable if the process is killed.

    A later step begins the file's next attempt: opening at step k takes away what an earlier attempt wrote beyond it.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        """Opens the file for the step after `resume_step`; see `rewind`."""
        rewind(path, resume_step)
        self._path = path
        with disk_faults(f"open {path}"):
            self._file = path.open("ab", buffering=0)

    def write(self, record: Record) -> None:
        """Appends the record and hands it to the operating system at once.

        Raises:
            MachineError: the disk is full.
        """
        rest = to_json_line(record).encode()
        with disk_faults(f"write {self._path}"):
            while rest:
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def rewind(path: Path, resume_step: int) -> None:
    """Takes the file back to what it held at `resume_step`, in one move; a half line at its end goes too.

    A run that starts at step 0 keeps nothing: its validation before the first step is repeated as well.

    Raises:
        DataError: a line other than the last is damaged; names it.
        MachineError: the disk refuses.
    """
    if not path.exists():
        return
    with (
        disk_faults(f"rewind {path} to step {resume_step}"),
        replacing(path) as new,
        new.open("w", encoding="utf-8") as file,
    ):
        file.writelines(line for line, record in _whole_lines(path) if 0 < resume_step >= record.step)


def read_records(path: Path) -> Iterator[Record]:
    """Records in the order of the file; what follows the last newline is a line still being written and is left out.

    Raises:
        DataError: a line is damaged; names it.
    """
    return (record for _, record in _whole_lines(path))


def _whole_lines(path: Path) -> Iterator[tuple[str, Record]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield line, from_json_line(line)
            except DataError as fault:
                raise DataError(f"{path}, line {number}: {fault}; mend or remove that line") from fault
