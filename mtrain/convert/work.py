"""Working folder of a conversion, which writes files one by one; a repeated call keeps the finished ones.

.OUT.partial/            next to OUT; one rename makes it OUT once it is complete and proven
    .plan.json           what is converted; another conversion starts over
    .done/FILE.json      facts of a finished file and their digest, written once the file is on disk
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mtrain.base.errors import ConfigError, DataError, MachineError, RunFolderError
from mtrain.base.files import LockOutcome, disk_faults, remove, sync_file, sync_folder, try_lock, write_atomically
from mtrain.base.plain_files import parsed_json
from mtrain.base.spelling import counted

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 10.0
_GB = 1e9


class Meter:
    """Shows the progress of any number of threads, in bytes."""

    def __init__(self, title: str, total_bytes: int) -> None:
        """`title` is the label of the progress bar, and `total_bytes` its end."""
        self._title, self._total_bytes = title, total_bytes
        self._lock = threading.Lock()
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}% {task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal or threading.current_thread() is not threading.main_thread(),
        )
        self._task = self._bar.add_task(title, total=max(total_bytes, 1), rate="")
        self.done_bytes = 0

    def __enter__(self) -> Self:
        self._start_s = self._reported_s = time.monotonic()
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if kind is None:
            _log.info(f"{self._title}: {self.done_bytes / _GB:.2f} GB in {self.seconds:.1f} s, {self.rate}")

    @property
    def seconds(self) -> float:
        """Seconds since the start of the block."""
        return time.monotonic() - self._start_s

    @property
    def rate(self) -> str:
        """Average speed so far, as text."""
        return f"{self.done_bytes / _GB / max(self.seconds, 1e-9):.2f} GB/s"

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done_bytes += num_bytes
            self._bar.update(self._task, completed=self.done_bytes, rate=self.rate)
            if self._bar.disable and time.monotonic() - self._reported_s > _SECONDS_BETWEEN_LINES:
                self._reported_s = time.monotonic()
                share = self.done_bytes / max(self._total_bytes, 1)
                _log.info(f"{self._title}: {share:.0%}, {self.done_bytes / _GB:.1f} GB, {self.rate}")


_CONVERSION, _DONE, _LOCK, _PART = ".plan.json", ".done", ".lock", ".part"
_STAGING_PREFIX, _STAGING_SUFFIX = ".", ".partial"


class Unit(NamedTuple):
    name: str
    size_bytes: int
    """Approximate size, for the progress bar."""


class StoppedError(Exception):
    """Stops a worker because another one failed, or the user stopped the program; never leaves this module."""


@contextlib.contextmanager
def working_folder(out: Path, conversion: dict[str, Any]) -> Iterator[Path]:
    """Yields the folder to write into, which becomes `out` if the block succeeds.

    Keeps the files of an earlier call for the same conversion, and those of a block that fails, unless it raises a
    DataError, which may mean that they are damaged.
    """
    if out.exists():
        raise ConfigError(f"{out} exists and is not overwritten; name another folder or move it away")
    folder = staging_folder(out)
    with contextlib.ExitStack() as resources:
        with disk_faults(f"make {folder}"):
            if folder.is_symlink():  # whose target belongs to somebody else
                folder.unlink()
            folder.mkdir(parents=True, exist_ok=True)
            lock = resources.enter_context((folder / _LOCK).open("w"))
            if try_lock(lock.fileno(), fcntl.LOCK_EX) is LockOutcome.BUSY:
                raise RunFolderError(f"another process is converting into {out}; wait for it or stop it")
        with disk_faults(f"write {folder}"):
            _begin(folder, conversion)
        try:
            yield folder
        except DataError as fault:
            with disk_faults(f"write {folder}"):
                (folder / _CONVERSION).unlink(missing_ok=True)
            raise DataError(f"{fault}; the next call starts over") from fault
        with disk_faults(f"complete {out}"):
            remove(folder / _DONE)
            for name in (_CONVERSION, _LOCK):
                (folder / name).unlink()
            for path in folder.rglob("*"):
                sync_folder(path) if path.is_dir() else sync_file(path)
            sync_folder(folder)
            folder.rename(out)
            sync_folder(out.parent)


def staging_folder(out: Path) -> Path:
    """Returns the working folder of a conversion into `out`."""
    return out.with_name(f"{_STAGING_PREFIX}{out.name}{_STAGING_SUFFIX}")


def staging_folders(parent: Path) -> list[Path]:
    """Lists the working folders of conversions into folders of `parent`, and links to them, in use or left over."""
    return sorted(parent.glob(f"{_STAGING_PREFIX}*{_STAGING_SUFFIX}"))


def is_published(path: Path) -> bool:
    """Returns whether a file in the working folder belongs to the result."""
    return path.name not in (_CONVERSION, _LOCK) and path.suffix != _PART


def _begin(folder: Path, conversion: dict[str, Any]) -> None:
    text = json.dumps(conversion, indent=1, sort_keys=True)
    path = folder / _CONVERSION
    is_resumed = path.is_file() and path.read_bytes() == text.encode()
    finished = {record.stem for record in (folder / _DONE).glob("*.json")} if is_resumed else set()
    for leftover in folder.iterdir():
        # deletes side files, which are written again because they may have changed
        if leftover.name not in (_LOCK, *((_CONVERSION, _DONE) if is_resumed else ()), *finished):
            remove(leftover)
    if is_resumed:
        _log.info(f"resuming an earlier call: {counted(len(finished), 'file')} done")
        return
    (folder / _DONE).mkdir()
    write_atomically(path, text)


Tell: TypeAlias = Callable[[int], None]
"""Receives the number of bytes that were written."""
Write: TypeAlias = Callable[[Unit, Path, Tell], Any]
"""Writes a file to a path, and returns facts about it that fit into JSON."""
IsWhole: TypeAlias = Callable[[Unit, Path, Any], bool]
"""Returns, from its facts, whether an existing file is still as it was written."""


def run_units(
    folder: Path, units: Sequence[Unit], write: Write, is_whole: IsWhole, num_workers: int, title: str
) -> dict[str, Any]:
    """Writes every file that is missing or damaged; returns file -> the facts from `write`."""
    _check_space(folder, sum(unit.size_bytes for unit in units if not _record(folder, unit).exists()))
    stop = threading.Event()

    def run(unit: Unit, meter: Meter) -> Any:
        def tell(num_bytes: int) -> None:
            if stop.is_set():
                raise StoppedError
            meter.add(num_bytes)

        try:
            return _recorded(folder, unit, write, is_whole, tell)
        except BaseException:
            stop.set()
            raise

    with disk_faults(f"write into {folder}"), Meter(title, sum(unit.size_bytes for unit in units)) as meter:
        if num_workers == 1:  # in this thread, as `mapped` says
            return {unit.name: run(unit, meter) for unit in units}
        with ThreadPoolExecutor(num_workers, thread_name_prefix="convert") as pool:
            futures = {unit.name: pool.submit(run, unit, meter) for unit in units}
            try:
                faults = [fault for future in futures.values() if (fault := future.exception()) is not None]
            except BaseException:
                stop.set()
                raise
        if faults:
            raise next(fault for fault in faults if not isinstance(fault, StoppedError))
    return {name: future.result() for name, future in futures.items()}


def _check_space(folder: Path, size_bytes: int) -> None:
    """Refuses a conversion that would fill the disk, before its first byte."""
    with disk_faults(f"look at {folder}"):
        free = shutil.disk_usage(folder).free
    if size_bytes > free:
        raise MachineError(
            f"{folder.parent} has {free / _GB:.2f} GB free, but the conversion needs {size_bytes / _GB:.2f} GB; free "
            "space, or name a folder on a larger disk"
        )


def _record(folder: Path, unit: Unit) -> Path:
    """Returns the path of a finished file's facts."""
    return folder / _DONE / f"{unit.name}.json"


def _recorded(folder: Path, unit: Unit, write: Write, is_whole: IsWhole, tell: Tell) -> Any:
    """Writes one file and its facts, or only reads the facts if the file is finished and whole."""
    record, file = _record(folder, unit), folder / unit.name
    facts = _read(record) if file.is_file() else None
    if facts is not None and is_whole(unit, file, facts):
        tell(unit.size_bytes)
        return facts
    tell(0)
    partial = folder / f"{unit.name}{_PART}"
    partial.unlink(missing_ok=True)
    facts = write(unit, partial, tell)
    sync_file(partial)
    partial.rename(file)
    write_atomically(record, json.dumps({"facts": facts, "digest": _digest(facts)}))
    return facts


def _read(record: Path) -> Any:
    """Returns the facts of a finished file; None if the record is missing or damaged."""
    try:
        content = parsed_json(record.read_bytes())
        return content["facts"] if content["digest"] == _digest(content["facts"]) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
