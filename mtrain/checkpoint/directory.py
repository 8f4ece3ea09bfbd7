"""The checkpoints folder of a run.

    checkpoints/
        step_00000010/                 published: complete, as mtrain.json inside says; never written to again
        latest                         name of the newest one, for people and scripts; not trusted here
        .tmp-step_00000020-1f2e3d4c/   an attempt at saving; many ranks may write into it
        .trash-*                       being deleted

An attempt becomes a checkpoint by one rename, so a process killed at any moment leaves the older ones intact and its
own attempt invisible. In a distributed run one rank calls `begin_attempt` and `publish`; the others get the attempt
from it, write their files in between, and are waited for before `publish`.
"""

import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mtrain.checkpoint.manifest import MANIFEST_NAME, Manifest, measured_files, read_manifest
from mtrain.errors import DataError, RunFolderError
from mtrain.files import disk_faults, sync_file, sync_folder, write_atomically

LATEST_NAME = "latest"
_ATTEMPT, _TRASH, _DAMAGED = ".tmp-", ".trash-", ".damaged-"
_STEP_FOLDER = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class CheckpointEntry:
    """A published checkpoint whose files are all there."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer updates completed."""
        return self.manifest.step


@dataclass(frozen=True)
class Attempt:
    """One try at saving a step; nothing takes it for a checkpoint until it is published."""

    root: Path
    step: int
    path: Path
    """The folder to write into."""


class Newest(NamedTuple):
    """What a resuming run finds."""

    entry: CheckpointEntry | None
    """None where nothing was ever published."""
    warnings: tuple[str, ...]
    """Every newer checkpoint that was passed over, and why; to be shown to the user."""


def step_name(step: int) -> str:
    """Name of a step's folder."""
    return f"step_{step:08d}"


def published_steps(root: Path) -> list[int]:
    """Steps that have a folder, ascending; whether it is good is not looked at."""
    with disk_faults(f"list {root}"):
        names = [path.name for path in root.iterdir() if path.is_dir()] if root.exists() else []
    matches = (_STEP_FOLDER.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match and step_name(int(match[1])) == match[0])


def load_entry(path: Path) -> CheckpointEntry:
    """The checkpoint in this folder, checked as `read_manifest` does.

    Raises:
        DataError: it is not whole, or its name and its manifest disagree on the step.
        MachineError: it cannot be read.
    """
    with disk_faults(f"read the checkpoint {path}"):
        manifest = read_manifest(path)
    if _STEP_FOLDER.fullmatch(path.name) and path.name != step_name(manifest.step):
        raise DataError(f"{path} holds step {manifest.step}: it was renamed or copied over")
    return CheckpointEntry(path, manifest)


def newest_good(root: Path) -> Newest:
    """The newest whole checkpoint; damaged ones are passed over and told of.

    Raises:
        DataError: something was published here, but nothing good is left; a run does not start anew over that.
    """
    warnings: list[str] = []
    for step in reversed(published_steps(root)):
        try:
            entry = load_entry(root / step_name(step))
        except DataError as fault:
            warnings.append(f"checkpoint of step {step} is passed over: {fault}")
        else:
            return Newest(entry, tuple(warnings))
    if (root / LATEST_NAME).exists():
        warnings.append(f"{root / LATEST_NAME} says that there was a checkpoint")
    if warnings:
        raise DataError(
            f"no usable checkpoint in {root}: {'; '.join(warnings)}; restore one, or set another run.dir to start anew"
        )
    return Newest(None, ())


def checkpoint_at(path: Path) -> Newest:
    """The checkpoint in this folder, or the newest good one where it is a run folder.

    Raises:
        DataError: neither is there.
    """
    if (path / MANIFEST_NAME).exists():
        return Newest(load_entry(path), ())
    newest = newest_good(path / "checkpoints")
    if newest.entry is None:
        raise DataError(f"{path} is neither a checkpoint (no {MANIFEST_NAME}) nor a run folder that holds one")
    return newest


def begin_attempt(root: Path, step: int) -> Attempt:
    """Makes a new empty folder to save the step into.

    Raises:
        RunFolderError: the step is published already.
        MachineError: the folder cannot be made.
    """
    _refuse_published(root, step)
    with disk_faults(f"begin a checkpoint in {root}"):
        path = root / _unique(_ATTEMPT, step)
        path.mkdir(parents=True)
    return Attempt(root, step, path)


def publish(attempt: Attempt, *, layout: str, config_hash: str, versions: Mapping[str, str]) -> CheckpointEntry:
    """Makes the attempt the step's checkpoint; every rank must have finished writing.

    A damaged folder of the same step, which a resumed run has passed over, is set aside as `.damaged-*`.

    Args:
        attempt: From `begin_attempt`.
        layout: The layout that saved it, in words.
        config_hash: Of the resolved configuration.
        versions: Package -> version.

    Raises:
        DataError: the attempt holds no file.
        RunFolderError: the step was published in the meantime.
        MachineError: the disk refuses; the attempt stays unpublished.
    """
    with disk_faults(f"publish the checkpoint of step {attempt.step} in {attempt.root}"):
        files = measured_files(attempt.path)
        if not files:
            raise DataError(f"nothing was saved in {attempt.path}; an empty checkpoint is not published")
        manifest = Manifest(
            step=attempt.step, layout=layout, config_hash=config_hash, versions=dict(versions), files=files
        )
        _sync_tree(attempt.path, files)
        write_atomically(attempt.path / MANIFEST_NAME, manifest.model_dump_json(indent=1) + "\n")
        final = attempt.root / step_name(attempt.step)
        _refuse_published(attempt.root, attempt.step)
        if final.exists():
            final.rename(attempt.root / _unique(_DAMAGED, attempt.step))
        attempt.path.rename(final)
        sync_folder(attempt.root)
        write_atomically(attempt.root / LATEST_NAME, final.name + "\n")
    return CheckpointEntry(final, manifest)


def delete_checkpoint(root: Path, step: int) -> None:
    """Deletes a published checkpoint; killed in between, it is gone from the list and `clean_leftovers` ends the work.

    Raises:
        MachineError: the disk refuses.
    """
    with disk_faults(f"delete the checkpoint of step {step} in {root}"):
        _delete(root / step_name(step))


def abandon(attempt: Attempt) -> None:
    """Deletes an attempt that failed."""
    with disk_faults(f"delete {attempt.path}"):
        _delete(attempt.path)


def clean_leftovers(root: Path) -> list[str]:
    """Deletes what dead attempts and interrupted deletions left; names of what was deleted.

    To be called at the start of a run, by the holder of the run folder's lock: whatever is there then is of the dead.
    """
    with disk_faults(f"clean {root}"):
        prefixes = (_ATTEMPT, _TRASH, ".new-")
        leftovers = sorted(path for path in root.iterdir() if path.name.startswith(prefixes)) if root.exists() else []
        for path in leftovers:
            _delete(path)
    return [path.name for path in leftovers]


def _refuse_published(root: Path, step: int) -> None:
    final = root / step_name(step)
    try:
        load_entry(final)
    except DataError:
        return
    raise RunFolderError(f"{final} exists and is whole; it is not overwritten. Move it away or set another run.dir")


def _sync_tree(folder: Path, files: Mapping[str, object]) -> None:
    for name in files:
        sync_file(folder / name)
    for inner in {(folder / name).parent for name in files} | {folder}:
        sync_folder(inner)


def _unique(prefix: str, step: int) -> str:
    return f"{prefix}{step_name(step)}-{secrets.token_hex(4)}"


def _delete(path: Path) -> None:
    """Takes the name away first, so that no reader and no late writer finds half of it."""
    trash = path.with_name(_TRASH + path.name.removeprefix(_TRASH))
    if trash != path:
        path.rename(trash)
    if trash.is_dir():
        shutil.rmtree(trash)
    else:
        trash.unlink()
