"""The checkpoints folder: published whole or not at all; the newest good one is found whatever lies around."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import DataError, MachineError, RunFolderError
from mtrain.checkpoint.format.hashed_file import read_facts
from mtrain.checkpoint.store.directory import (
    abandon,
    checkpoint_at,
    clean_leftovers,
    named_staging,
    newest_good,
    open_staging,
    publish,
    set_aside,
)
from mtrain.checkpoint.store.steps import published_steps
from tests.checkpoint.checkpoints import (
    FILES,
    begin_staging,
    change_manifest,
    damage,
    facts,
    publish_staging,
    save,
    write_files,
)
from tests.fault_table import Notice
from tests.messages import refuses


def newest_step(root: Path) -> int | None:
    entry = newest_good(root).entry
    return None if entry is None else entry.step


def test_nothing_saved_is_no_checkpoint(tmp_path: Path) -> None:
    assert newest_good(tmp_path) == (None, ())
    assert newest_good(tmp_path / "missing") == (None, ())


def test_a_published_checkpoint_is_found_with_its_facts(tmp_path: Path) -> None:
    saved = save(tmp_path, 10)
    newest = newest_good(tmp_path)
    assert newest == (saved, ())
    assert saved.path == tmp_path / "step_00000010"
    assert saved.manifest.layout == "tp1-pp1-cp1-dp1"
    assert {name: facts.size_bytes for name, facts in saved.manifest.files.items()} == {
        name: len(content) for name, content in FILES.items()
    }
    assert (tmp_path / "latest").read_text() == "step_00000010\n"
    assert json.loads((saved.path / "mtrain.json").read_text())["step"] == 10


def test_a_staging_directory_is_not_a_checkpoint(tmp_path: Path) -> None:
    staging = begin_staging(tmp_path, 10)
    write_files(staging)
    shutil.copy(save(tmp_path, 5).path / "mtrain.json", staging.path)
    assert newest_step(tmp_path) == 5


def test_two_saves_of_one_step_do_not_share_a_staging_directory(tmp_path: Path) -> None:
    first, second = begin_staging(tmp_path, 10), begin_staging(tmp_path, 10)
    assert first.path != second.path
    write_files(first)
    write_files(second)
    publish_staging(second)
    with refuses(RunFolderError):
        publish_staging(first)
    assert newest_step(tmp_path) == 10


def test_an_existing_step_is_not_begun_again(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with refuses(RunFolderError, "step_00000010"):
        begin_staging(tmp_path, 10)


def test_a_staging_directory_without_files_is_not_published(tmp_path: Path) -> None:
    with refuses(DataError):
        publish_staging(begin_staging(tmp_path, 10))
    assert newest_step(tmp_path) is None


def test_what_is_published_is_newest_by_number_not_by_name_or_time(tmp_path: Path) -> None:
    for step in (100_000_000, 99_999_999, 7):
        save(tmp_path, step)
    assert published_steps(tmp_path) == [7, 99_999_999, 100_000_000]
    assert newest_step(tmp_path) == 100_000_000


def _change(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: change_manifest(folder, **changes)


def _edit(old: bytes, new: bytes) -> Callable[[Path], object]:
    """Writes other bytes under the same SHA-256."""

    def edit(folder: Path) -> None:
        raw = (folder / "mtrain.json").read_bytes()
        assert old in raw
        (folder / "mtrain.json").write_bytes(raw.replace(old, new, 1))

    return edit


def _instead(name: str, put: Callable[[Path], object]) -> Callable[[Path], object]:
    """Replaces a file by something else; the file is kept next to the checkpoint."""

    def replace(folder: Path) -> None:
        (folder / name).rename(folder.parent / "kept")
        put(folder / name)

    return replace


def _link(path: Path) -> None:
    path.symlink_to(path.parents[1] / "kept")


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 40 * 2**30)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


FACTS = {"size_bytes": 1, "sha256": "0" * 64}
LONG = "x" * 5000
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut shard": (lambda folder: (folder / "__0_0.distcp").write_bytes(b"s"), "has 1 bytes, but 5 were saved"),
    "missing shard": (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "missing folder": (lambda folder: shutil.rmtree(folder / "extra"), "extra/facts.json is missing"),
    "no manifest": (lambda folder: (folder / "mtrain.json").unlink(), "has no mtrain.json"),
    "half manifest": (lambda folder: os.truncate(folder / "mtrain.json", 30), "cannot be understood"),
    "garbage manifest": (lambda folder: (folder / "mtrain.json").write_bytes(b"\xff\0"), "cannot be understood"),
    "file without a digest": (_change(files={"a": {"size_bytes": 1}}), "needs its sha256 or its blake3"),
    "file with two digests": (_change(files={"a": {**FACTS, "blake3": "0" * 64}}), "and not both"),
    "unknown format": (_change(format=5), "cannot be understood: format"),
    "no files": (_change(files={}), "cannot be understood: files"),
    "file outside": (_change(files={"../x": FACTS}), "is not inside"),
    "file elsewhere": (_change(files={"/etc/passwd": FACTS}), "is not inside"),
    "file with NUL": (_change(files={"a\0b": FACTS}), "is not inside"),
    "file of a long name": (_change(files={LONG: FACTS}), "xxx is missing"),
    "another step": (_change(step=21), "contains step 21"),
    "huge step": (_change(step=10**30), "cannot be understood: step"),
    "empty folder": (_empty, "has no mtrain.json"),
    "one bit": (_edit(b'"step": 20', b'"step": 24'), "has changed since it was written"),
    "a word": (_edit(b'"dataset": null', b'"dataset": "x"'), "has changed since it was written"),
    "no seal": (_edit(b',\n "sha256": "', b',\n "sha257": "'), "cannot be understood"),
    "seal cut off": (
        lambda folder: (folder / "mtrain.json").write_bytes((folder / "mtrain.json").read_bytes()[:-82] + b"\n}\n"),
        "its own SHA-256, is damaged",
    ),
    "format of 0.1.0 with a seal": (_edit(b'"format": 4', b'"format": 2'), "has changed since it was written"),
}
INSTEAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "link to the manifest": (_instead("mtrain.json", _link), "mtrain.json is not a manifest: it is a link"),
    "folder for the manifest": (_instead("mtrain.json", Path.mkdir), "mtrain.json is not a manifest: it is a folder"),
    "pipe for the manifest": (_instead("mtrain.json", os.mkfifo), "is a device or a pipe"),
    "manifest of 40 GiB": (_instead("mtrain.json", _sparse), "bytes, but at most"),
    "deep manifest": (_instead("mtrain.json", lambda path: path.write_bytes(b"[" * 10**6)), "cannot be understood"),
    "huge number": (_instead("mtrain.json", lambda path: path.write_bytes(b"1" * 10**6)), "cannot be understood"),
    "link to a shard": (_instead("common.pt", _link), "common.pt is a link"),
    "folder for a shard": (_instead("common.pt", Path.mkdir), "common.pt is missing"),
    "pipe for a shard": (_instead("common.pt", os.mkfifo), "is a link, a device or a pipe"),
    "link to a folder": (_instead("extra", _link), "extra is a link"),
}
UNVERIFIED: dict[str, tuple[Callable[[Path], object], str]] = {
    "file more": (lambda folder: (folder / "__1_0.distcp").touch(), "__1_0.distcp is not listed in mtrain.json"),
    "file more below": (lambda folder: (folder / "extra" / "x").touch(), "x is not listed in mtrain.json"),
    "one file named": (
        _change(files={"common.pt": {"size_bytes": 6, "sha256": hashlib.sha256(b"common").hexdigest()}}),
        "is not listed in mtrain.json, so it cannot be verified",
    ),
}


def passed_over(root: Path, do_damage: Callable[[Path], object]) -> str:
    """Returns the warning about a newer checkpoint after this damage."""
    save(root, 10)
    do_damage(save(root, 20).path)
    newest = newest_good(root)
    assert newest.entry is not None
    assert newest.entry.step == 10
    (warning,) = newest.warnings
    return warning


@pytest.mark.fault(
    "checkpoints",
    "manifest missing, cut, garbage or with any changed bit; shard missing or cut; step renamed",
    happens="the checkpoint before is taken, with a warning that says why; none good: exit code 3",
    exit_code=None,
)
@pytest.mark.parametrize(("do_damage", "why"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_passed_over_loudly(
    tmp_path: Path, do_damage: Callable[[Path], object], why: str, notice: Notice
) -> None:
    with notice:
        assert why in passed_over(tmp_path, do_damage)


@pytest.mark.fault(
    "checkpoints",
    "folder, link, pipe or a file of 40 GiB in the place of a manifest or a shard",
    happens="the checkpoint before is taken, with a warning that says why; none good: exit code 3",
    exit_code=None,
)
@pytest.mark.parametrize(("do_damage", "why"), INSTEAD.values(), ids=INSTEAD.keys())
def test_something_else_in_the_place_of_a_file_is_passed_over_loudly(
    tmp_path: Path, do_damage: Callable[[Path], object], why: str, notice: Notice
) -> None:
    with notice:
        assert why in passed_over(tmp_path, do_damage)


@pytest.mark.fault(
    "checkpoints",
    "file that the manifest does not name",
    happens="nothing unverified is loaded: the checkpoint before is taken, with a warning that names the file",
    exit_code=None,
)
@pytest.mark.parametrize(("do_damage", "why"), UNVERIFIED.values(), ids=UNVERIFIED.keys())
def test_a_checkpoint_with_unverified_files_is_passed_over_loudly(
    tmp_path: Path, do_damage: Callable[[Path], object], why: str, notice: Notice
) -> None:
    with notice:
        assert why in passed_over(tmp_path, do_damage)


def test_what_a_network_file_system_leaves_of_deleted_files_is_no_fault(tmp_path: Path) -> None:
    (save(tmp_path, 10).path / ".nfs000000001").touch()
    assert newest_step(tmp_path) == 10


def test_a_checkpoint_that_turned_out_to_be_unusable_is_passed_over_loudly(tmp_path: Path) -> None:
    save(tmp_path, 10)
    bad = save(tmp_path, 20)
    newest = newest_good(tmp_path, {20: "a bit is wrong"})
    assert newest.entry is not None
    assert (newest.entry.step, newest.warnings) == (10, ("the checkpoint of step 20 is skipped: a bit is wrong",))
    with refuses(DataError):
        checkpoint_at(bad.path, {20: "a bit is wrong"})
    set_aside(tmp_path, 20)
    assert newest_good(tmp_path).warnings == ()
    save(tmp_path, 20)


def test_a_run_that_lost_its_folder_publishes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 10)
    staging = begin_staging(tmp_path, 20)
    write_files(staging)

    def check() -> None:
        raise RunFolderError("taken over")

    with refuses(RunFolderError):
        publish(staging, facts(20), check=check)
    assert published_steps(tmp_path) == [10]
    assert (tmp_path / "latest").read_text() == "step_00000010\n"
    # the other run may have saved the step already: it only matters that it has the folder
    save(tmp_path, 20)
    with refuses(RunFolderError):
        publish(staging, facts(20), check=check)
    with refuses(RunFolderError):
        open_staging(named_staging(tmp_path, 20), check)


def test_known_files_must_be_what_was_written(tmp_path: Path) -> None:
    staging = begin_staging(tmp_path, 10)
    write_files(staging)
    known = {name: read_facts(staging.path / name) for name in FILES}
    (staging.path / "common.pt").write_bytes(b"cut")
    with refuses(DataError):
        publish(staging, facts(10), known)
    (staging.path / "common.pt").unlink()
    with refuses(DataError):
        publish(staging, facts(10), known)


def test_a_damaged_step_can_be_saved_again_and_is_kept_aside(tmp_path: Path) -> None:
    save(tmp_path, 10)
    damage(tmp_path, 10)
    save(tmp_path, 10)
    assert newest_good(tmp_path).warnings == ()
    (aside,) = tmp_path.glob(".damaged-step_00000010-*")
    assert (aside / "__0_0.distcp").read_bytes() == b"sha"


def test_leftovers_of_the_dead_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 10)
    write_files(begin_staging(tmp_path, 20))
    (tmp_path / ".trash-step_00000005-aa").mkdir()
    (tmp_path / ".new-latest-aa").write_text("")
    (tmp_path / "notes.txt").write_text("mine")
    assert len(clean_leftovers(tmp_path)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "notes.txt", "step_00000010"]
    assert clean_leftovers(tmp_path) == []


def test_an_abandoned_staging_directory_leaves_nothing(tmp_path: Path) -> None:
    staging = begin_staging(tmp_path, 10)
    write_files(staging)
    abandon(staging)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_machine_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses(MachineError, "step_00000010"):
        begin_staging(tmp_path / "file" / "checkpoints", 10)


def test_a_run_folder_and_a_checkpoint_both_name_a_checkpoint(tmp_path: Path) -> None:
    saved = save(tmp_path / "checkpoints", 10)
    assert checkpoint_at(saved.path).entry == saved
    assert checkpoint_at(tmp_path).entry == saved
    with refuses(DataError):
        checkpoint_at(tmp_path / "elsewhere")


def test_a_copied_checkpoint_may_have_any_name(tmp_path: Path) -> None:
    saved = save(tmp_path, 10)
    shutil.copytree(saved.path, tmp_path / "best")
    entry = checkpoint_at(tmp_path / "best").entry
    assert entry is not None
    assert entry.step == 10
