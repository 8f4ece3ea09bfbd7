"""A conversion's working folder: files appear one by one, and what was finished is not done again.

.OUT.partial/            beside OUT; becomes OUT by one rename when everything is there and proven
    .plan.json           what is being converted; another plan starts anew
    .done/FILE.json      what is known of a finished file; written after the file is on disk
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from mtrain.base.errors import ConfigError, RunFolderError
from mtrain.base.files import LockOutcome, disk_faults, remove, sync_file, sync_folder, try_lock, write_atomically
from mtrain.convert.progress import Meter

_PLAN, _DONE, _LOCK, _PART = ".plan.json", ".done", ".lock", ".part"
_STAGING_PREFIX, _STAGING_SUFFIX = ".", ".partial"


class Unit(NamedTuple):
    """One file to be written."""

    name: str
    size_bytes: int
    """About; for the progress bar."""


class StoppedError(Exception):
    """Another worker failed or the user stopped the program; never leaves this module."""


@contextlib.contextmanager
def working_folder(out: Path, plan: dict[str, Any]) -> Iterator[Path]:
    """The folder to write into, which becomes `out` when the block ends well.

    What an earlier call with the same plan left is kept, and stays where the block fails.

    Raises:
        ConfigError: `out` exists.
        RunFolderError: Another process is converting into it.
        MachineError: The disk refuses.
    """
    if out.exists():
        raise ConfigError(f"{out} exists and is not overwritten; name another folder or move it away")
    folder = staging_folder(out)
    with contextlib.ExitStack() as held:
        with disk_faults(f"make {folder}"):
            if folder.is_symlink():  # what it names is somebody else's
                folder.unlink()
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((folder / _LOCK).open("w"))
            if try_lock(lock.fileno(), fcntl.LOCK_EX) is LockOutcome.BUSY:
                raise RunFolderError(f"another process is converting into {out}; wait for it or stop it")
        with disk_faults(f"write {folder}"):
            _begin(folder, plan)
        yield folder
        with disk_faults(f"complete {out}"):
            remove(folder / _DONE)
            for name in (_PLAN, _LOCK):
                (folder / name).unlink()
            for path in folder.rglob("*"):
                sync_folder(path) if path.is_dir() else sync_file(path)
            sync_folder(folder)
            folder.rename(out)
            sync_folder(out.parent)


def staging_folder(out: Path) -> Path:
    """Where a conversion into `out` works until it is complete."""
    return out.with_name(f"{_STAGING_PREFIX}{out.name}{_STAGING_SUFFIX}")


def staging_folders(parent: Path) -> list[Path]:
    """What conversions into folders of `parent` have left there or are working in; links too."""
    return sorted(parent.glob(f"{_STAGING_PREFIX}*{_STAGING_SUFFIX}"))


def is_published(path: Path) -> bool:
    """Whether a file in the working folder belongs to what comes out."""
    return path.name not in (_PLAN, _LOCK) and path.suffix != _PART


def _begin(folder: Path, plan: dict[str, Any]) -> None:
    said = json.dumps(plan, indent=1, sort_keys=True)
    path = folder / _PLAN
    if path.is_file() and path.read_bytes() == said.encode():
        finished = len(list((folder / _DONE).glob("*.json")))
        print(f"going on where an earlier call stopped: {finished} files are done", flush=True)
        return
    for left in folder.iterdir():
        if left.name != _LOCK:
            remove(left)
    (folder / _DONE).mkdir()
    write_atomically(path, said)


Tell: TypeAlias = Callable[[int], None]
"""Called with bytes that are written."""
Write: TypeAlias = Callable[[Unit, Path, Tell], Any]
"""Writes a file to a path; gives what is to be known of it, as JSON."""


def run_units(folder: Path, units: Sequence[Unit], write: Write, num_workers: int, title: str) -> dict[str, Any]:
    """Writes every file that is not done yet.

    Args:
        folder: From `working_folder`.
        units: All files.
        write: Writes one.
        num_workers: Threads, each with one file at a time.
        title: For the progress bar.

    Returns:
        File -> what `write` gave.

    Raises:
        MachineError: The disk refuses.
    """
    stop = threading.Event()

    def run(unit: Unit, meter: Meter) -> Any:
        def tell(num_bytes: int) -> None:
            if stop.is_set():
                raise StoppedError
            meter.add(num_bytes)

        try:
            return _recorded(folder, unit, write, tell)
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


def _recorded(folder: Path, unit: Unit, write: Write, tell: Tell) -> Any:
    """Writes one file and what is known of it, or reads that where it is done."""
    record = folder / _DONE / f"{unit.name}.json"
    if record.exists():
        tell(unit.size_bytes)
        return json.loads(record.read_text(encoding="utf-8"))
    tell(0)
    partial = folder / f"{unit.name}{_PART}"
    partial.unlink(missing_ok=True)
    facts = write(unit, partial, tell)
    sync_file(partial)
    partial.rename(folder / unit.name)
    write_atomically(record, json.dumps(facts))
    return facts
