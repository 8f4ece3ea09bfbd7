"""The folder `checkpoints` of a run.

    checkpoints/
        step_00000010/                 published and complete, and never changed again
        latest                         name of the newest checkpoint, for people and scripts; not trusted here
        .damaged-step_00000030-*       published and damaged, kept for people to examine
        .tmp-step_00000020-1f2e3d4c/   staging directory that many ranks may write into
        .trash-*                       being deleted

One rename makes a staging directory a checkpoint, so a process that is killed at any moment leaves older checkpoints
intact and its staging directory invisible. In a distributed run, one rank calls `named_staging` and `publish`; in
between, all ranks write their files under the name that it has chosen.
"""

import fcntl
import os
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mtrain.base.background import mapped
from mtrain.base.errors import DataError, MachineError, RunFolderError
from mtrain.base.files import LockOutcome, disk_faults, remove, sync_file, sync_folder, try_lock, write_atomically
from mtrain.base.spelling import counted
from mtrain.checkpoint.format.hashed_file import read_facts
from mtrain.checkpoint.store.manifest import (
    MANIFEST_NAME,
    CheckpointInfo,
    FileInfo,
    Manifest,
    read_manifest,
    write_manifest,
)
from mtrain.checkpoint.store.steps import STEP_FOLDER, published_steps, step_name

LATEST_NAME = "latest"
_ATTEMPT, _TRASH, _DAMAGED = ".tmp-", ".trash-", ".damaged-"


@dataclass(frozen=True)
class CheckpointEntry:
    """Published checkpoint that has all of its files."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


@dataclass(frozen=True)
class StagingDir:
    """Folder into which a step is saved; becomes a checkpoint when it is published."""

    root: Path
    step: int
    path: Path


class AfterPublishingError(MachineError):
    """Failure of an action after a checkpoint was published."""


class Newest(NamedTuple):
    """Newest good checkpoint, from which a run resumes."""

    entry: CheckpointEntry | None
    """None if nothing was ever published."""
    warnings: tuple[str, ...]
    """Why each newer checkpoint was skipped, for the user."""


def load_entry(path: Path) -> CheckpointEntry:
    """Loads the checkpoint in this folder, checked like `read_manifest`; raises DataError if it is damaged, or if its
    name and its manifest disagree about the step."""
    with disk_faults(f"read the checkpoint {path}"):
        manifest = read_manifest(path)
    # a folder with another name (an import, a user's copy) may have any step
    if STEP_FOLDER.fullmatch(path.name) and path.name != step_name(manifest.step):
        raise DataError(f"{path} contains step {manifest.step}: it was renamed or overwritten")
    return CheckpointEntry(path, manifest)


def newest_good(root: Path, unusable: Mapping[int, str] | None = None) -> Newest:
    """Finds the newest whole checkpoint; skips and reports damaged ones.

    Args:
        unusable: Step -> reason, for checkpoints that have the right files with wrong bytes.

    Raises:
        DataError: Something was published here, but nothing good is left; a run must not start over on top of it.
    """
    warnings: list[str] = []
    for step in reversed(published_steps(root)):
        try:
            # state/verified.py has read all bytes; `load_entry` only compares sizes
            if unusable is not None and step in unusable:
                raise DataError(unusable[step])
            entry = load_entry(root / step_name(step))
        except DataError as fault:
            warnings.append(f"the checkpoint of step {step} is skipped: {fault}")
        else:
            return Newest(entry, tuple(warnings))
    if (root / LATEST_NAME).exists():
        warnings.append(f"{root / LATEST_NAME} names a checkpoint that was published")
    warnings += [f"{path} does not have the name of one of our checkpoints" for path in _unknown_folders(root)]
    if warnings:
        raise DataError(
            f"no usable checkpoint in {root}: {'; '.join(warnings)}; restore one, or set another run.dir to start over"
        )
    return Newest(None, ())


def checkpoint_at(path: Path, unusable: Mapping[int, str] | None = None) -> Newest:
    """Finds the checkpoint in this folder, or a run folder's newest good one; `unusable` as in `newest_good`."""
    if (path / MANIFEST_NAME).exists():
        entry = load_entry(path)
        if unusable is not None and entry.step in unusable:
            raise DataError(f"{unusable[entry.step]}; restore the checkpoint or use another")
        return Newest(entry, ())
    newest = newest_good(path / "checkpoints", unusable)
    if newest.entry is None:
        if not path.exists():
            remedy = (
                f"fix the path, or make a checkpoint there of a Hugging Face model: mtrain convert import HF {path}"
            )
        elif (path / "config.json").exists():
            remedy = f"name this Hugging Face folder as model.hf, or import it first: mtrain convert import {path} OUT"
        else:
            remedy = "name a checkpoint, or a run that has saved one"
        raise DataError(
            f"{path} is neither a checkpoint (no {MANIFEST_NAME}) nor a run folder with a checkpoint; {remedy}"
        )
    return newest


def named_staging(root: Path, step: int) -> StagingDir:
    """Returns a new name for a save of the step; does not touch the disk."""
    return StagingDir(root, step, root / _unique(_ATTEMPT, step))


def open_staging(staging: StagingDir, check: Callable[[], None] = lambda: None) -> None:
    """Creates the staging directory; several ranks may do so. Raises RunFolderError if the step is already published,
    after `check`, which raises if another run has taken the folder over."""
    _refuse_published(staging.root, staging.step, check)
    with disk_faults(f"begin {step_name(staging.step)} in {staging.root}"):
        staging.path.mkdir(parents=True, exist_ok=True)


def publish(
    staging: StagingDir,
    facts: CheckpointInfo,
    known: Mapping[str, FileInfo] | None = None,
    check: Callable[[], None] = lambda: None,
) -> CheckpointEntry:
    """Makes the staging directory the step's checkpoint, once every rank has finished writing.

    Renames a damaged folder of the same step, which a resumed run has skipped, or a link, to `.damaged-*`.

    Args:
        known: Path -> facts, for files that were hashed while they were written; other files are read and synced.
        check: Called immediately before the rename, before `latest` is written, and if the step is already published;
            raises if this run may no longer write here.

    Raises:
        RunFolderError: The step was published in the meantime.
        AfterPublishingError: The checkpoint is published, but a later write failed.
    """
    assert facts.step == staging.step, (facts.step, staging.step)
    with disk_faults(f"publish the checkpoint of step {staging.step} in {staging.root}"):
        # first files, then their folders, then the manifest (complete), then the rename (visible): a crash at any point
        # leaves the step absent or whole
        files = _measured_files(staging.path, known or {})
        if not files:
            raise DataError(f"nothing was saved in {staging.path}, and an empty checkpoint is not published")
        manifest = Manifest(**facts.model_dump(), files=files)
        for folder in sorted({(staging.path / name).parent for name in files} | {staging.path}):
            sync_folder(folder)
        write_manifest(staging.path, manifest)
        final = staging.root / step_name(staging.step)
        _refuse_published(staging.root, staging.step, check)
        check()  # as late as possible
        # lexists, because even a dangling link is in the way; rename replaces only an empty folder
        if os.path.lexists(final):
            set_aside(staging.root, staging.step)
        staging.path.rename(final)
    try:
        with disk_faults(f"write {staging.root / LATEST_NAME}"):
            sync_folder(staging.root)  # `latest` must not name a checkpoint that a crash can undo
            # again, because a process that was suspended after the rename must not overwrite a later name
            check()
            write_atomically(staging.root / LATEST_NAME, final.name + "\n")
    except MachineError as fault:
        raise AfterPublishingError(f"{final} is published, but mtrain {fault}") from fault
    return CheckpointEntry(final, manifest)


def delete_checkpoint(root: Path, step: int) -> bool:
    """Deletes a published checkpoint unless someone is `reading` it; returns whether it is deleted.

    A process that is killed during the deletion leaves no visible checkpoint; `clean_leftovers` deletes its remains.
    """
    path = root / step_name(step)
    if _reading_here[path.absolute()]:  # for file systems without locks
        return False
    with disk_faults(f"delete the checkpoint of step {step} in {root}"):
        # O_RDWR: NFS turns flock into a byte-range lock, and an exclusive one needs a file that is open for writing
        descriptor = os.open(path / MANIFEST_NAME, os.O_RDWR | os.O_CLOEXEC)
        try:
            if try_lock(descriptor, fcntl.LOCK_EX) is LockOutcome.BUSY:
                return False
            _delete(path)
        finally:
            os.close(descriptor)
    return True


@contextmanager
def reading(entry: CheckpointEntry) -> Iterator[None]:
    """Keeps every process, or this one on file systems without locks, from deleting the checkpoint inside the block;
    raises DataError if it has been deleted."""
    folder, manifest = entry.path.absolute(), entry.path / MANIFEST_NAME
    with disk_faults(f"read the checkpoint {entry.path}"):
        try:
            descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise DataError(f"{entry.path} has been deleted meanwhile") from None
    # before the lock, because without locks this counter alone stops the retention thread
    _reading_here[folder] += 1
    try:
        with disk_faults(f"read the checkpoint {entry.path}"):
            # it may have been renamed to .trash-* between open and lock
            if try_lock(descriptor, fcntl.LOCK_SH) is LockOutcome.BUSY or not manifest.exists():
                raise DataError(f"{entry.path} has been deleted meanwhile")
        yield
    finally:
        _reading_here[folder] -= 1
        os.close(descriptor)


_reading_here: Counter[Path] = Counter()
"""Folder -> number of this process's blocks that are `reading` the checkpoint."""


def set_aside(root: Path, step: int) -> Path:
    """Renames a damaged checkpoint to `.damaged-*`, so that the step can be saved again."""
    with disk_faults(f"set the damaged checkpoint of step {step} aside in {root}"):
        return (root / step_name(step)).rename(root / _unique(_DAMAGED, step))


def abandon(staging: StagingDir) -> None:
    """Deletes the staging directory of a save that failed."""
    with disk_faults(f"delete {staging.path}"):
        _delete(staging.path)


def clean_leftovers(root: Path) -> list[str]:
    """Deletes the remains of failed saves and interrupted deletions, at the start of a run that holds the lock; returns
    their names."""
    with disk_faults(f"clean {root}"):
        # keeps .damaged-*, which may be all that is left of a step; people decide
        prefixes = (_ATTEMPT, _TRASH, ".new-")
        leftovers = sorted(path for path in root.iterdir() if path.name.startswith(prefixes)) if root.exists() else []
        for path in leftovers:
            _delete(path)
    return [path.name for path in leftovers]


def _refuse_published(root: Path, step: int, check: Callable[[], None]) -> None:
    final = root / step_name(step)
    try:
        load_entry(final)
    except DataError:
        return
    check()  # if another start owns the folder, that is the error to report
    raise RunFolderError(f"{final} exists and is whole, so it is not overwritten; move it away or set another run.dir")


def _measured_files(folder: Path, known: Mapping[str, FileInfo]) -> dict[str, FileInfo]:
    """Returns the facts of every file in the folder except the manifest; reads and syncs files not in `known`."""
    files: dict[str, FileInfo] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path == folder / MANIFEST_NAME:
            continue
        name = path.relative_to(folder).as_posix()
        if name not in known:
            sync_file(path)
        files[name] = known[name] if name in known else read_facts(path)
        # detects a rank that writes late, and a full disk
        if (size := path.stat().st_size) != files[name].size_bytes:
            raise DataError(f"{path} has {size} bytes, but {files[name].size_bytes} were written")
    if missing := sorted(known.keys() - files.keys()):
        raise DataError(f"{folder / missing[0]} was written and has disappeared")
    return files


def _unknown_folders(root: Path) -> list[Path]:
    """Returns folders that are not ours, such as another program's checkpoints."""
    with disk_faults(f"list {root}"):
        folders = [path for path in root.iterdir() if path.is_dir()] if root.exists() else []
    ours = {step_name(step) for step in published_steps(root)}
    return sorted(path for path in folders if path.name not in ours and not path.name.startswith("."))


def _unique(prefix: str, step: int) -> str:
    # random, so that a surviving writer of an earlier save of this step cannot write into this one
    return f"{prefix}{step_name(step)}-{secrets.token_hex(4)}"


def _delete(path: Path) -> None:
    """Renames before it deletes, so that nobody sees half a folder; keeps the target of a link."""
    trash = path.with_name(_TRASH + path.name.removeprefix(_TRASH))
    if trash != path:
        path.rename(trash)
    remove(trash)


def files_of_reader(files: Mapping[str, FileInfo], reader: int, num_readers: int) -> list[str]:
    """Returns the files that one of several readers verifies, each exactly one reader's: from the largest on, a file
    goes to the reader with the fewest bytes."""
    loads, by_reader = [0] * num_readers, [list[str]() for _ in range(num_readers)]
    # by size and then by name, so that every rank computes the same lists without communication
    for name, facts in sorted(files.items(), key=lambda item: (-item[1].size_bytes, item[0])):
        least = loads.index(min(loads))
        loads[least] += facts.size_bytes
        by_reader[least].append(name)
    return by_reader[reader]


def verify_files(entry: CheckpointEntry, names: Collection[str], num_threads: int = 1) -> None:
    """Reads files of a checkpoint, and compares their digests with the manifest's.

    Args:
        num_threads: Number of files to hash in parallel; one thread hashes 1 to 3 GB/s.

    Raises:
        DataError: A file has other bytes than were saved.
    """
    with disk_faults(f"read the checkpoint {entry.path}"):
        # threads suffice, because both algorithms release the GIL while they hash
        saved = entry.manifest.files
        actual = mapped(lambda name: read_facts(entry.path / name, saved[name].algorithm), names, num_threads)
    changed = [name for name, facts in zip(names, actual, strict=True) if facts != saved[name]]
    if changed:
        more = f" (and {counted(len(changed) - 1, 'more file')})" if len(changed) > 1 else ""
        shown = saved[changed[0]].algorithm.shown
        raise DataError(f"{entry.path / changed[0]}{more} has changed since it was saved ({shown} differs)")
