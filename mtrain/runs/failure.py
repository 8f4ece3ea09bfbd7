"""Failures of a start: a record of each failed rank, and a summary of the first cause.

Every rank that fails writes a record into the run folder; the watchdog and the launcher write one for a rank that
cannot. Each of them also writes the first cause among the records so far as the start's summary. A failure that follows
from another rank's failure is the first cause only if no other record exists.
"""

import contextlib
import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mtrain.base.errors import (
    ConfigError,
    DataError,
    MachineError,
    MtrainError,
    NumericError,
    RankLostError,
    RunFolderError,
)
from mtrain.base.files import write_atomically
from mtrain.base.spelling import counted

_MEMORY_WORDS = ("OutOfMemoryError", "MemoryError")
REPORT_TO = "MTRAIN_REPORT_TO"
"""Environment variable with the path of a file that gets the run folder's path after a failure, for the launcher."""
_KEPT_STARTS = 20
_NUM_FRAMES = 3
_SUMMARY = "mtrain_summary"


class FailureClass(StrEnum):
    """Kind of a failure, which decides who has to act."""

    USER_INPUT = "user input"
    DATA = "data"
    NUMERIC = "numeric"
    OUT_OF_MEMORY = "out of memory"
    LOST_PEER = "lost peer"
    DISK = "disk"
    CONFLICT = "run folder in use"
    MACHINE = "machine"
    BUG = "bug"


_AGAIN = "start the same command again: the run resumes from its newest checkpoint"
_ADVICE = {
    FailureClass.USER_INPUT: "change what the message names; `mtrain check CONFIG` finds most faults without a GPU",
    FailureClass.DATA: f"repair what the message names, then {_AGAIN}",
    FailureClass.NUMERIC: "look at the steps before it (`mtrain plot`), lower optimizer.lr, or leave out the data of "
    "the step; the message says which checkpoint is good",
    FailureClass.OUT_OF_MEMORY: "lower train.micro_batch_size or data.seq_length, recompute more (train.recompute), or "
    f"divide the model over more ranks; then {_AGAIN}",
    FailureClass.LOST_PEER: f"{_AGAIN}; if the same node is named twice, exclude it and read its kernel log",
    FailureClass.DISK: f"free space or fix the disk that the message names, then {_AGAIN}",
    FailureClass.CONFLICT: "leave the folder to the other start, or stop that start first",
    FailureClass.MACHINE: f"fix what the message names, then {_AGAIN}",
    FailureClass.BUG: (
        "the traceback names the line: in your own function, or a bug of mtrain, which you can report with the "
        "traceback and config.yaml"
    ),
}

GONE = "gone"
"""`FailureRecord.error`, written by the watchdog, of a rank that ended without a record."""


@dataclass(frozen=True)
class FailureRecord:
    rank: int
    kind: FailureClass
    error: str
    """Class of the exception, name of the signal, or the rank's state that the watchdog saw."""
    message: str
    """Text after "error: "."""
    exit_code: int
    """Exit code of the run if this failure is its first cause."""
    reported_by: str
    """`rank`, `watchdog` or `launcher`."""
    time_s: float
    """Unix time."""
    place: str | None = None
    """Phase and step of the rank, if known."""
    start: int = 0
    launch: str | None = None
    """Identifier of the local launcher's launch; None without that launcher."""
    host: str = ""
    stack: tuple[str, ...] = ()
    """Frames of the program, innermost call first."""
    files: tuple[str, ...] = ()

    @property
    def is_consequence(self) -> bool:
        """Whether the record only says that another rank failed."""
        return self.kind is FailureClass.LOST_PEER and self.reported_by == "rank"


@contextlib.contextmanager
def recording(run_dir: Path, rank: int, start: int, place: Callable[[], str]) -> Iterator[None]:
    """Records an exception that ends the block, and raises it again; `reported_summary` then returns its summary."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, RunFolderError):  # the folder belongs to another start
            failure = failure_of(error, rank, start, place(), _frames(error))
            with contextlib.suppress(OSError):  # such as a full disk; the message itself is still printed
                record_failure(run_dir, failure)
                vars(error)[_SUMMARY] = summary(failure, run_dir)
        raise


def reported_summary(error: BaseException) -> str | None:
    """Returns the summary of an error that `recording` recorded; None for other errors."""
    text: str | None = vars(error).get(_SUMMARY)
    return text


def _frames(error: BaseException) -> list[str]:
    """Returns the frames of a bug, innermost call first; empty for other errors, whose message is enough."""
    if class_of(error) is not FailureClass.BUG:
        return []
    frames = traceback.extract_tb(error.__traceback__)[-_NUM_FRAMES:]
    return [f'File "{frame.filename}", line {frame.lineno} in {frame.name}' for frame in reversed(frames)]


_CLASSES: tuple[tuple[type[MtrainError], FailureClass], ...] = (
    (ConfigError, FailureClass.USER_INPUT),
    (DataError, FailureClass.DATA),
    (NumericError, FailureClass.NUMERIC),
    (RankLostError, FailureClass.LOST_PEER),
    (RunFolderError, FailureClass.CONFLICT),
)


def class_of(error: BaseException) -> FailureClass:
    known = next((kind for errors, kind in _CLASSES if isinstance(error, errors)), None)
    if known is not None:
        return known
    cause = error.__cause__ if isinstance(error, MachineError) else error
    if isinstance(error, MachineError) and isinstance(cause, OSError):
        return FailureClass.DISK
    if type(cause).__name__ in _MEMORY_WORDS or "can't allocate memory" in str(cause):
        return FailureClass.OUT_OF_MEMORY
    return FailureClass.MACHINE if isinstance(error, MachineError) else FailureClass.BUG


def failure_of(
    error: BaseException, rank: int, start: int, place: str | None, stack: Sequence[str] = ()
) -> FailureRecord:
    text = str(error) if isinstance(error, MtrainError) else f"{type(error).__name__}: {error}"
    return FailureRecord(
        rank=rank,
        kind=class_of(error),
        error=type(error).__name__,
        message=text,
        exit_code=error.exit_code if isinstance(error, MtrainError) else 1,
        reported_by="rank",
        time_s=time.time(),
        place=place,
        start=start,
        launch=os.environ.get("MTRAIN_LAUNCH"),
        host=socket.gethostname(),
        stack=tuple(stack),
    )


def first_cause(failures: Sequence[FailureRecord]) -> FailureRecord:
    """Returns the first cause of several failures: the earliest one that is not a consequence of another.

    For a rank that died silently, the launcher's record is preferred, since it names the signal, and the watchdog's
    earlier record does not. For a rank that was killed because it hung, the watchdog's record stays, since the kill was
    not the cause.
    """
    first = min(failures, key=lambda failure: (failure.is_consequence, failure.time_s, failure.rank))
    if (first.kind, first.error) != (FailureClass.LOST_PEER, GONE):
        return first
    return next((one for one in failures if (one.rank, one.reported_by) == (first.rank, "launcher")), first)


def summary(failure: FailureRecord, run_dir: Path, num_failed: int = 1) -> str:
    """Formats the final message for the user: several lines, each with a newline."""
    by = f"[rank {failure.rank}] " if failure.rank > 0 and failure.reported_by == "rank" else ""
    lines = [f"error: {by}{failure.message}"]
    where = f"rank {failure.rank} on {failure.host}" if failure.rank >= 0 else failure.host
    phase = f", in {failure.place}" if failure.place else ""
    followers = f"; {counted(num_failed - 1, 'more rank')} failed after it" if num_failed > 1 else ""
    lines.append(f"  class: {failure.kind} (exit code {failure.exit_code}), {where}{phase}{followers}")
    lines += [f"  at: {frame}" for frame in failure.stack]
    lines += [f"  see: {path}" for path in failure.files]
    lines += [f"  try: {_ADVICE[failure.kind]}", f"  kept in: {run_dir / 'failure.json'}"]
    return "\n".join(lines) + "\n"


def record_failure(run_dir: Path, failure: FailureRecord, again: bool = False) -> FailureRecord:
    """Writes a record, and the summary of the first cause so far, which it returns.

    Args:
        again: Whether to replace an earlier record of the same reporter and rank, because more is known now.

    Raises:
        OSError: The disk failed.
    """
    folder = records_folder(run_dir, failure.start)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{failure.reported_by}_{max(failure.rank, 0):05d}.json"
    if again or not path.exists():  # the first record is closest to the cause
        write_atomically(path, json.dumps(asdict(failure), indent=2) + "\n")
    if file := os.environ.get(REPORT_TO):
        Path(file).write_text(str(run_dir.absolute()))
    reported = recorded(run_dir, failure.start) or [failure]
    first = first_cause(reported)
    if failure.is_consequence and (run_dir / "failure.json").exists():
        return first  # one summary is enough, even if a thousand ranks follow
    num_failed = len({one.rank for one in reported})
    write_atomically(run_dir / "failure.json", json.dumps(asdict(first), indent=2) + "\n")
    write_atomically(run_dir / "failure.txt", summary(first, run_dir, num_failed))
    return first


def recorded(run_dir: Path, start: int) -> list[FailureRecord]:
    records = []
    with contextlib.suppress(OSError):
        for path in sorted(records_folder(run_dir, start).glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                records.append(_read(path))
    return records


def last_failure(run_dir: Path) -> FailureRecord | None:
    """Reads the first cause of the latest start's failure; None if the start has not failed."""
    try:
        return _read(run_dir / "failure.json")
    except (OSError, ValueError, TypeError):
        return None


def last_summary(run_dir: Path) -> str:
    """Reads the text summary of the latest failure; empty without a failure."""
    with contextlib.suppress(OSError):
        return (run_dir / "failure.txt").read_text(encoding="utf-8")
    return ""


def clear_summary(run_dir: Path) -> None:
    """Removes the summary and the records of all but the last starts at a new start; raises OSError."""
    for name in ("failure.json", "failure.txt"):
        (run_dir / name).unlink(missing_ok=True)
    for old in sorted((run_dir / "failures").glob("start_*"))[:-_KEPT_STARTS]:
        for path in old.iterdir():
            path.unlink()
        old.rmdir()


def records_folder(run_dir: Path, start: int) -> Path:
    """Returns the folder of a start's records and stacks."""
    return run_dir / "failures" / f"start_{start:05d}"


def _read(path: Path) -> FailureRecord:
    content: dict[str, Any] = json.loads(path.read_bytes())
    content |= {name: tuple(content[name]) for name in ("stack", "files")}
    return FailureRecord(**content | {"kind": FailureClass(content["kind"])})
