"""Checkpoints that clients have saved, by name, below the folder of a service.

A checkpoint exists once its description, which is written last, is on disk. Names from clients are checked before they
become parts of a path.
"""

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mtrain.base.errors import DataError, MachineError
from mtrain.base.files import disk_faults, write_atomically
from mtrain.base.plain_files import parsed_json, read_plain_file
from mtrain.serve.operations import Kind, Lora, TinkerPath

_DESCRIPTION = "checkpoint.json"
_MOST_BYTES = 2**20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Described:
    """Description of a checkpoint."""

    model_id: str
    kind: Kind
    name: str
    base_model: str
    lora: dict[str, Any] | None
    """Options of the adapter; None: the whole model was trained."""
    time: float
    """Unix time of the save."""
    user_metadata: dict[str, str] | None = None
    expires_at: float | None = None
    """Unix time after which it is removed; None: never."""
    run_metadata: dict[str, Any] | None = None
    """The client's metadata of the training run."""

    @property
    def adapter(self) -> Lora:
        return Lora(rank=0) if self.lora is None else Lora(**self.lora)

    def is_over(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now

    @property
    def tinker_path(self) -> TinkerPath:
        return TinkerPath(self.model_id, self.kind, self.name)


class Store:
    """Folder of a service; every rank may have one, but the first rank writes descriptions."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, lock: int | None = None) -> None:
        """Creates no folder yet. `lock` is the descriptor from another process's store of this folder; None if this is
        the first one."""
        self.clock = clock
        self.lock = os.memfd_create("mtrain-store") if lock is None else lock
        """Descriptor of a file in memory, for another process of this machine. A shared lock on it is held while
        checkpoints are read, an exclusive one while they change, by threads and processes."""
        self._root = path / "served"

    def folder(self, path: TinkerPath) -> Path:
        """Returns the run folder of a checkpoint, which exists if it was saved."""
        return self._root / path.model_id / path.kind / path.name

    def fresh(self, path: TinkerPath) -> Path:
        """Empties and returns the folder to save into, next to its final path. On the first rank."""
        folder = self._beside(path, "new")
        with disk_faults(f"write {folder}"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
        return folder

    def publish(self, described: Described) -> None:
        """Moves the folder of `fresh` to its final path, replacing an older checkpoint of that name."""
        path = described.tinker_path
        folder, new, old = self.folder(path), self._beside(path, "new"), self._beside(path, "old")
        with self._locked(), disk_faults(f"write {folder}"):
            self._describe(new, described)
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)  # if the service dies here, `restore` moves it back
            new.rename(folder)
            shutil.rmtree(old, ignore_errors=True)

    def restore(self) -> None:
        """Moves checkpoints back that a killed service had moved away; deletes unfinished saves and removals."""
        with disk_faults(f"read {self._root}"):
            for old in self._root.glob("*/*/.old.*"):
                final = old.with_name(old.name.removeprefix(".old."))
                if final.exists():
                    shutil.rmtree(old)
                else:
                    old.rename(final)
            for left in (*self._root.glob("*/*/.new.*"), *self._root.glob("*/*/.gone.*")):
                shutil.rmtree(left)

    def described(self, path: TinkerPath) -> Described:
        with self.reading(path) as description:
            return description

    def _described(self, path: TinkerPath) -> Described:
        description = self._read(self.folder(path) / _DESCRIPTION)
        if description is None or description.is_over(self.clock()):
            raise DataError(f"there is no checkpoint {path}; list those of a training run, and name one of them")
        return description

    @contextmanager
    def reading(self, path: TinkerPath) -> Iterator[Described]:
        """Protects a checkpoint from removal inside the `with` block; yields its description."""
        with self._locked(fcntl.LOCK_SH):
            yield self._described(path)

    def is_free(self, path: TinkerPath) -> bool:
        """Says whether a path is free for a new checkpoint; removes an expired one first."""
        with self._locked():
            description = self._read(self.folder(path) / _DESCRIPTION)
            if description is not None and description.is_over(self.clock()):
                self._remove(path)
            return not self.folder(path).exists()

    def all(self) -> list[Described]:
        now = self.clock()
        with self._locked(fcntl.LOCK_SH):
            saved = self._on_disk()
        return sorted((item for item in saved if not item.is_over(now)), key=lambda item: -item.time)

    def set_lifetime(self, path: TinkerPath, ttl_seconds: int | None) -> None:
        with self._locked(), disk_faults(f"write {self.folder(path)}"):
            ends = None if ttl_seconds is None else self.clock() + ttl_seconds
            self._describe(self.folder(path), replace(self._described(path), expires_at=ends))

    def expire(self) -> None:
        """Removes expired checkpoints; those that cannot be removed are left to the next call."""
        for description in self._on_disk():
            if not description.is_over(self.clock()):
                continue
            path = TinkerPath.parsed(str(description.tinker_path))
            try:
                self.is_free(path)
            except MachineError as fault:
                _log.warning(f"{path} has expired, but remains for now: {fault}")

    def files(self, path: TinkerPath) -> list[str]:
        folder = self.folder(path)
        with self.reading(path):
            files = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
        return sorted(str(file) for file in files if str(file) != _DESCRIPTION)

    def remove(self, path: TinkerPath) -> None:
        with self._locked():
            self._described(path)
            self._remove(path)

    def _remove(self, path: TinkerPath) -> None:
        with disk_faults(f"remove {self.folder(path)}"):
            gone = self._beside(path, "gone")  # if the service dies, `restore` finishes the removal
            shutil.rmtree(gone, ignore_errors=True)
            self.folder(path).rename(gone)
            shutil.rmtree(gone)

    @contextmanager
    def _locked(self, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
        # opened again each time: threads that share an open file would share its lock
        with open(f"/proc/self/fd/{self.lock}", "rb") as file:
            fcntl.flock(file, kind)
            yield

    def _describe(self, folder: Path, described: Described) -> None:
        write_atomically(folder / _DESCRIPTION, json.dumps(asdict(described)))

    def _on_disk(self) -> list[Described]:
        descriptions = map(self._read, self._root.glob(f"*/*/[!.]*/{_DESCRIPTION}"))
        return [description for description in descriptions if description is not None]

    def _beside(self, path: TinkerPath, what: str) -> Path:
        folder = self.folder(path)
        return folder.with_name(f".{what}.{folder.name}")

    def _read(self, path: Path) -> Described | None:
        try:
            return Described(**parsed_json(read_plain_file(path, _MOST_BYTES)))
        except FileNotFoundError:  # never there, or removed just now
            return None
