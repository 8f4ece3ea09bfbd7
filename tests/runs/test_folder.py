"""The run folder: one run at a time, whole files, readable refusals."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mtrain.base.errors import DataError, MachineError, RunFolderError
from mtrain.config.changes import Change, changes
from mtrain.config.consent import NEUTRAL_KEYS
from mtrain.config.kinds import sections_at
from mtrain.runs.folder import RunFolder
from tests.base.crash import killed_at_every_file_operation
from tests.fault_table import Notice
from tests.messages import refuses

HOLD_LOCK = """
import sys, time
from pathlib import Path
from mtrain.runs.folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    time.sleep(60)
"""

HOLD_LOCK_AND_FORK = """
import os, sys, time
from pathlib import Path
from mtrain.runs.folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    if os.fork() == 0:
        print("child begins", flush=True)
        sys.stdin.read()
        print("child ends", flush=True)
        os._exit(0)
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "runs" / "first")
    made.create()
    return made


@contextmanager
def another_process_in(folder: RunFolder, **environment: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(folder.path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def test_create_makes_the_folders_and_leaves_no_probe(folder: RunFolder) -> None:
    folder.create()
    folder.probe()
    assert sorted(path.name for path in folder.path.rglob("*")) == ["checkpoints", "logs"]


@pytest.mark.fault(
    "ranks",
    "two launches into one run folder",
    happens="the second is refused, and its message names process, machine and job of the first",
    exit_code=6,
)
def test_a_second_process_is_refused_with_the_name_of_the_first(folder: RunFolder, notice: Notice) -> None:
    with another_process_in(folder, SLURM_JOB_ID="4711") as process:
        expected = rf"in use by process {process.pid} on \S+, Slurm job 4711 .*set another run.dir"
        with notice, pytest.raises(RunFolderError, match=expected) as error, folder.locked():
            pass
        assert error.value.exit_code == notice.exit_code


@pytest.mark.fault(
    "ranks",
    "the lock that a killed run has left",
    happens="it ends with its process; the next start takes the folder",
    exit_code=None,
)
def test_the_lock_of_a_killed_process_is_no_obstacle(folder: RunFolder, notice: Notice) -> None:
    with another_process_in(folder) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=600)
        with notice, folder.locked() as lock:
            lock.check()
        assert f"process {os.getpid()} " in lock.owner


def test_a_lock_ends_with_its_block(folder: RunFolder) -> None:
    with folder.locked(), pytest.raises(RunFolderError), folder.locked():
        pass
    with folder.locked():
        pass


def test_a_forked_child_that_outlives_a_killed_run_does_not_hold_the_lock(folder: RunFolder) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK_AND_FORK, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "child begins\n"
        process.kill()
        process.wait(timeout=600)
        with folder.locked() as lock:
            lock.check()
        output, _ = process.communicate(timeout=600)  # closes the child's standard input: it may end
    assert output == "child ends\n"


def test_a_forked_child_leaves_the_lock_with_its_parent(folder: RunFolder) -> None:
    with folder.locked():
        child = multiprocessing.get_context("fork").Process(target=os.getpid)
        child.start()
        child.join()
        with pytest.raises(RunFolderError), folder.locked():
            pass


def test_a_run_whose_folder_was_taken_over_stops_before_it_publishes(folder: RunFolder) -> None:
    with folder.locked() as lock:
        lock.check()
        folder.lock_file.write_text("process 1 on elsewhere [0123]\n")  # as where nodes do not see each other's locks
        with refuses(RunFolderError, "process 1"):
            lock.check()


def test_what_a_killed_run_was_about_to_write_is_removed_under_the_lock(folder: RunFolder) -> None:
    folder.write_config("a: 1\n")
    for _ in killed_at_every_file_operation(lambda: folder.write_config("a: 2\n"), folder.path):
        assert folder.saved_config() in ("a: 1\n", "a: 2\n")
    assert list(folder.path.glob(".new-*"))
    with folder.locked():
        assert not list(folder.path.glob(".new-*"))
    assert folder.saved_config() == "a: 2\n"


def test_config_and_marker(folder: RunFolder) -> None:
    assert folder.saved_config() is None
    folder.write_config("run:\n  dir: ü\n")
    assert folder.saved_config() == "run:\n  dir: ü\n"
    folder.clear_requeue()
    folder.set_requeue("SIGUSR1 at step 12")
    assert folder.requeue_marker == folder.path / "REQUEUE"
    assert folder.requeue_marker.read_text() == "SIGUSR1 at step 12\n"
    folder.clear_requeue()
    assert not folder.requeue_marker.exists()


def test_the_environment_comes_back(folder: RunFolder) -> None:
    assert folder.saved_environment() is None
    folder.write_environment({"torch": "2.9", "device": "cpu"})
    assert folder.saved_environment() == {"torch": "2.9", "device": "cpu"}


@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"', "[" * 100_000, '{"torch": NaN}'])
def test_a_damaged_environment_is_refused(folder: RunFolder, text: str) -> None:
    folder.environment.write_text(text)
    with refuses(DataError, "environment.json"):
        folder.saved_environment()


def large(path: Path) -> None:
    """Returns a file of 40 GiB that takes no space on the disk."""
    path.touch()
    os.truncate(path, 40 * 2**30)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "binary": lambda path: path.write_bytes(b"\x80\xff\0"),
    "nul": lambda path: path.write_bytes(b"a: \0"),
    "no sections": lambda path: path.write_text("- 1\n"),
    "no yaml": lambda path: path.write_text("a: b: c\n"),
    "deep": lambda path: path.write_text("a: " + "[" * 100_000),
    "bomb": lambda path: path.write_text("a: &a [1]\n" + "".join(f"b{n}: &a [*a, *a]\n" for n in range(60))),
    "many digits": lambda path: path.write_text("a: " + "9" * 10_000),
    "large": large,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("do_damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_configuration_is_refused(folder: RunFolder, do_damage: Callable[[Path], object]) -> None:
    do_damage(folder.config)
    with refuses(DataError, "config.yaml"):
        folder.saved_config()


def test_a_file_in_the_way_is_a_machine_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses(MachineError, "file/run"):
        RunFolder(tmp_path / "file" / "run").create()


def test_a_read_only_folder_is_a_machine_error() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        folder.create()
        folder.logs.chmod(0o555)
        folder.path.chmod(0o755)
        folder.checkpoints.chmod(0o777)
        try:
            with as_an_ordinary_user(), refuses(MachineError):
                folder.probe()
        finally:
            folder.logs.chmod(0o755)


@contextmanager
def as_an_ordinary_user() -> Iterator[None]:
    """Becomes `nobody` for a while, since root may write anywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


OLD = """
run: {dir: runs/a}
layout: {tp: 2}
model: {num_layers: 4, megatron: {}, rope: {base: 10000.0}}
train: {global_batch_size: 8, num_steps: 10, micro_batch_size: 1}
data: {seq_length: 64, train: [{path: a, weight: 1.0}]}
"""


def difference(old: str, new: str) -> list[str]:
    """Returns the keys that make a different run of it."""
    return [change.key for change in changes(old, new) if not change.is_neutral]


def test_the_same_run_on_another_layout_differs_in_nothing() -> None:
    new = OLD.replace("tp: 2", "tp: 1, cp: 4").replace("num_steps: 10", "num_steps: 20").replace("runs/a", "runs/b")
    assert new != OLD
    assert difference(OLD, new.replace("micro_batch_size: 1", "micro_batch_size: 4")) == []


def test_differences_are_reported_by_dotted_key() -> None:
    new = (
        OLD.replace("global_batch_size: 8", "global_batch_size: 16")
        .replace("base: 10000.0", "base: 5e5")
        .replace("weight: 1.0", "weight: 2.0")
        .replace("megatron: {}", "megatron: {init_method_std: 0.1}, qk_norm: true")
    )
    assert difference(OLD, new) == [
        "data.train",
        "model.megatron",
        "model.megatron.init_method_std",
        "model.qk_norm",
        "model.rope.base",
        "train.global_batch_size",
    ]
    assert difference(OLD, OLD) == []


def test_a_null_and_a_missing_key_differ() -> None:
    assert difference("a: {b: null, c: 1}", "a: {c: 1}") == ["a.b"]
    assert difference("a: {b: null}", "a: {b: {d: 1, e: 2}}") == ["a.b.d", "a.b.e"], (
        "an absent section is compared by its keys"
    )
    assert changes("a: {b: null, c: 1}", "a: {c: 1}") == [Change("a.b", "null", None, is_neutral=False)]


def test_changes_tell_both_values_and_which_leave_the_run_the_same() -> None:
    new = OLD.replace("tp: 2", "tp: 1").replace("path: a", "path: ü")
    assert changes(OLD, new) == [
        Change("data.train", '[{"path": "a", "weight": 1.0}]', '[{"path": "ü", "weight": 1.0}]', is_neutral=False),
        Change("layout.tp", "2", "1", is_neutral=True),
    ]


@pytest.mark.parametrize("key", NEUTRAL_KEYS)
def test_neutral_keys_exist(key: str) -> None:
    *place, name = key.split(".")
    assert any(name in section.model_fields for section in sections_at(tuple(place))), key


def test_of_two_starts_the_later_one_keeps_the_folder(folder: RunFolder) -> None:
    """An older start was held up before it wrote its name, and then wrote it over the later one's."""
    with folder.locked() as older:
        pass
    with folder.locked() as later:
        assert (older.number, later.number) == (1, 2)
        folder.lock_file.write_text(older.owner)
        later.check()
        assert folder.lock_file.read_text() == later.owner
        with refuses(RunFolderError):
            older.check()


def test_what_is_written_often_looks_after_a_pause_only(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with folder.locked() as lock:
        folder.lock_file.write_text("process 1 on elsewhere (start 9) [0123]\n")
        lock.check_now_and_then()
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 1.5)
        with refuses(RunFolderError, "process 1"):
            lock.check_now_and_then()
