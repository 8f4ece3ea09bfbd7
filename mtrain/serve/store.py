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
from mtrain.serve.operations import Kind, Lora, Place

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
    def place(self) -> Place:
        return Place(self.model_id, self.kind, self.name)


class Store:
    """Folder of a service; every rank may have one, but the first rank writes descriptions."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, lock: int | None = None) -> None:
        """Creates no folder yet; `lock` is that of another process's store in this folder, None if there is none
        yet."""
        self.clock = clock
        self.lock = os.memfd_create("mtrain-store") if lock is None else lock
        """Descriptor of a file in memory, for another process of this machine. It is locked, shared, while checkpoints
        are read, and exclusively while they change; clients and the engine do so in threads and processes."""
        self._root = path / "served"

    def folder(self, place: Place) -> Path:
        """Returns the run folder of a checkpoint, which exists if it was saved."""
        return self._root / place.model_id / place.kind / place.name

    def fresh(self, place: Place) -> Path:
        """Returns an empty folder to save into, next to its final place. On the first rank."""
        folder = self._beside(place, "new")
        with disk_faults(f"write {folder}"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
        return folder

    def publish(self, described: Described) -> None:
        """Moves what was saved into `fresh` to its place, replacing an older checkpoint of that name."""
        place = described.place
        folder, new, old = self.folder(place), self._beside(place, "new"), self._beside(place, "old")
        with self._locked(), disk_faults(f"write {folder}"):
            self._describe(new, described)
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)  # a service that ends here finds it again in `restore`
            new.rename(folder)
            shutil.rmtree(old, ignore_errors=True)

    def restore(self) -> None:
        """Restores what a killed service had moved away; removes unfinished saves and removals."""
        with disk_faults(f"read {self._root}"):
            for old in self._root.glob("*/*/.old.*"):
                place = old.with_name(old.name.removeprefix(".old."))
                if place.exists():
                    shutil.rmtree(old)
                else:
                    old.rename(place)
            for left in (*self._root.glob("*/*/.new.*"), *self._root.glob("*/*/.gone.*")):
                shutil.rmtree(left)

    def described(self, place: Place) -> Described:
        with self.reading(place) as found:
            return found

    def _described(self, place: Place) -> Described:
        found = self._read(self.folder(place) / _DESCRIPTION)
        if found is None or found.is_over(self.clock()):
            raise DataError(f"there is no checkpoint {place}; list those of a training run, and name one of them")
        return found

    @contextmanager
    def reading(self, place: Place) -> Iterator[Described]:
        """Keeps a checkpoint from being removed inside the `with` block; yields its description."""
        with self._locked(fcntl.LOCK_SH):
            yield self._described(place)

    def is_free(self, place: Place) -> bool:
        """Says whether a name is free for a new checkpoint; removes an expired one."""
        with self._locked():
            found = self._read(self.folder(place) / _DESCRIPTION)
            if found is not None and found.is_over(self.clock()):
                self._remove(place)
            return not self.folder(place).exists()

    def all(self) -> list[Described]:
        now = self.clock()
        with self._locked(fcntl.LOCK_SH):
            found = self._on_disk()
        return sorted((each for each in found if not each.is_over(now)), key=lambda each: -each.time)

    def set_lifetime(self, place: Place, ttl_seconds: int | None) -> None:
        with self._locked(), disk_faults(f"write {self.folder(place)}"):
            ends = None if ttl_seconds is None else self.clock() + ttl_seconds
            self._describe(self.folder(place), replace(self._described(place), expires_at=ends))

    def expire(self) -> None:
        """Removes expired checkpoints; those that the disk keeps are left to the next call."""
        for each in self._on_disk():
            if not each.is_over(self.clock()):
                continue
            place = Place.parsed(str(each.place))
            try:
                self.is_free(place)
            except MachineError as fault:
                _log.warning(f"{place} has expired, but remains for now: {fault}")

    def files(self, place: Place) -> list[str]:
        folder = self.folder(place)
        with self.reading(place):
            found = [each.relative_to(folder) for each in folder.rglob("*") if each.is_file() and not each.is_symlink()]
        return sorted(str(each) for each in found if str(each) != _DESCRIPTION)

    def remove(self, place: Place) -> None:
        with self._locked():
            self._described(place)
            self._remove(place)

    def _remove(self, place: Place) -> None:
        with disk_faults(f"remove {self.folder(place)}"):
            gone = self._beside(place, "gone")  # a removal that is killed is finished by `restore`
            shutil.rmtree(gone, ignore_errors=True)
            self.folder(place).rename(gone)
            shutil.rmtree(gone)

    @contextmanager
    def _locked(self, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
        # opened anew: threads that share an open file would share its lock
        with open(f"/proc/self/fd/{self.lock}", "rb") as file:
            fcntl.flock(file, kind)
            yield

    def _describe(self, folder: Path, described: Described) -> None:
        write_atomically(folder / _DESCRIPTION, json.dumps(asdict(described)))

    def _on_disk(self) -> list[Described]:
        found = [self._read(each) for each in self._root.glob(f"*/*/[!.]*/{_DESCRIPTION}")]
        return [each for each in found if each is not None]

    def _beside(self, place: Place, what: str) -> Path:
        folder = self.folder(place)
        return folder.with_name(f".{what}.{folder.name}")

    def _read(self, path: Path) -> Described | None:
        try:
            return Described(**parsed_json(read_plain_file(path, _MOST_BYTES)))
        except FileNotFoundError:  # never there, or removed just now
            return None
