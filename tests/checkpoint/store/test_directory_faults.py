"""Faults around the checkpoints folder: processes that die, links, names not to be trusted, no file locks."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from mtrain.base.errors import DataError
from mtrain.checkpoint.store.directory import (
    checkpoint_at,
    clean_leftovers,
    delete_checkpoint,
    newest_good,
    publish,
    reading,
)
from mtrain.checkpoint.store.retention import Keep, apply_retention
from mtrain.checkpoint.store.steps import published_steps
from tests.base.crash import killed_at_every_file_operation
from tests.checkpoint.checkpoints import FILES, begin_staging, damage, facts, save, write_files
from tests.checkpoint.store.test_directory import newest_step
from tests.fault_table import Notice
from tests.messages import refuses
from tests.runs.no_flock import forbid_flock


@pytest.mark.fault(
    "checkpoints",
    "`latest` is missing, garbage, or names another checkpoint",
    happens="it is not trusted; the newest good checkpoint is taken",
    exit_code=None,
)
@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\0", b"step_99999999\n", b"../../etc\n", b"step_00000010\n"])
def test_latest_is_not_trusted(tmp_path: Path, content: bytes | None, notice: Notice) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "latest").unlink()
    if content is not None:
        (tmp_path / "latest").write_bytes(content)
    with notice:
        assert newest_step(tmp_path) == 20


@pytest.mark.fault(
    "checkpoints",
    "every checkpoint of a run is damaged",
    happens="the run does not start anew over them; one message names each and why",
    exit_code=3,
)
def test_a_run_does_not_start_anew_over_damaged_checkpoints(tmp_path: Path, notice: Notice) -> None:
    for step in (10, 20):
        save(tmp_path, step)
        damage(tmp_path, step)
    with notice, refuses(DataError, "step 20", "step 10", "run.dir"):
        newest_good(tmp_path)
    assert notice.exit_code == DataError.exit_code


def test_a_run_does_not_start_anew_where_checkpoints_have_vanished(tmp_path: Path) -> None:
    shutil.rmtree(save(tmp_path, 10).path)
    with refuses(DataError):
        newest_good(tmp_path)


@pytest.mark.fault(
    "checkpoints",
    "only folders of other names lie where checkpoints belong",
    happens="the run does not start anew next to them",
    exit_code=3,
)
@pytest.mark.parametrize("name", ["iter_0000010", "step_garbage", "step_10"])
def test_a_run_does_not_start_anew_next_to_what_it_does_not_know(tmp_path: Path, name: str, notice: Notice) -> None:
    (tmp_path / name).mkdir()
    with notice, refuses(DataError, name):
        newest_good(tmp_path)
    assert notice.exit_code == DataError.exit_code
    save(tmp_path, 10)
    assert newest_step(tmp_path) == 10


@pytest.mark.fault(
    "checkpoints",
    "a step folder or a leftover of a save is a link",
    happens="the link is removed when its turn comes; what it names stays as it is",
    exit_code=None,
)
def test_links_are_removed_and_never_followed(tmp_path: Path, notice: Notice) -> None:
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for step in (10, 20, 30):
        save(root, step)
    moved = (root / "step_00000010").rename(elsewhere)
    (root / "step_00000010").symlink_to(moved)
    for name in (".tmp-step_00000040-aa", ".trash-step_00000005", ".new-latest-aa"):
        (root / name).symlink_to(moved)
    (root / "step_00000040").symlink_to(tmp_path / "nowhere")
    with notice:
        assert checkpoint_at(root / "step_00000010").entry is not None, "it may be read, wherever it lies"
        assert apply_retention(root, Keep(1), 30) == [10, 20]
        assert len(clean_leftovers(root)) == 3
        save(root, 40)
    assert notice.exit_code is None
    assert newest_step(root) == 40
    assert sorted(path.name for path in root.iterdir() if not path.name.startswith(".damaged-step_00000040-")) == [
        "latest",
        "step_00000030",
        "step_00000040",
    ]
    assert {path.name for path in moved.iterdir()} >= {"mtrain.json", *(name.split("/")[0] for name in FILES)}


def test_where_there_are_no_locks_a_process_does_not_delete_what_it_reads(tmp_path: Path) -> None:
    entry = save(tmp_path, 10)
    child = os.fork()
    if child == 0:
        try:
            forbid_flock(errno.ENOLCK)
            with reading(entry), reading(entry):
                assert not delete_checkpoint(tmp_path, 10)
            assert delete_checkpoint(tmp_path, 10)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert published_steps(tmp_path) == []


@pytest.mark.fault(
    "checkpoints",
    "kill -9 before any operation with a file of a save",
    happens="the newest checkpoint is whole; a start deletes leftovers",
    exit_code=5,
)
def test_a_process_killed_at_any_point_of_a_save_leaves_a_whole_newest_checkpoint(
    tmp_path: Path, notice: Notice
) -> None:
    first = save(tmp_path, 10)
    seen = []
    for _ in killed_at_every_file_operation(lambda: save(tmp_path, 20), tmp_path):
        with notice:
            newest = newest_good(tmp_path)
        assert newest.entry is not None
        assert newest.warnings == ()
        for name, content in FILES.items():
            assert (newest.entry.path / name).read_bytes() == content
        seen.append(newest.entry.step)
        clean_leftovers(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} <= {"latest", "step_00000010", "step_00000020"}
        if newest.entry != first:
            shutil.rmtree(newest.entry.path)
    assert set(seen) == {10, 20}
    assert seen == sorted(seen)
    assert len(seen) > 20


def test_a_process_killed_while_replacing_a_damaged_step_loses_no_good_one(tmp_path: Path) -> None:
    save(tmp_path, 10)
    staging = begin_staging(tmp_path, 20)
    write_files(staging)
    (tmp_path / "step_00000020").mkdir()

    def publish_copy() -> None:
        publish(staging, facts(staging.step))

    copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    seen = set()
    for _ in killed_at_every_file_operation(publish_copy, tmp_path):
        seen.add(newest_step(tmp_path))
        shutil.rmtree(tmp_path)
        shutil.copytree(copy, tmp_path)
    assert seen == {10, 20}
