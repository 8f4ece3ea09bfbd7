"""Runs whose disk fills up: their messages, what they leave, and how they go on when there is room again.

Each disk plays a scene of `full_disk_scenes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mtrain.checkpoint.store.directory import newest_good, verify_files
from mtrain.report.metrics.jsonl import read_records
from tests.fault_table import Notice
from tests.tools.small_disk import play
from tests.training.faults import full_disk_scenes as scenes
from tests.training.test_trainer import DEADLINE_S, command, numbers
from tests.warm import Command, program_environment

__all__ = ["command"]


@pytest.fixture
def on_a_small_disk() -> Callable[..., Any]:
    """Plays a scene on a disk of its own, where the machine allows mounting one: tests/needs.py."""
    return play


def said(folder: Path, *names: str) -> str:
    """Returns the standard errors of these commands."""
    return "".join((folder / f"{name}.err").read_text() for name in names)


def steps_with_scalars(folder: Path) -> list[int]:
    """Returns the steps that TensorBoard shows."""
    return [event.step for event in EventAccumulator(str(folder)).Reload().Scalars("train/loss")]


@pytest.mark.fault(
    "disk",
    "the disk of the run folder is full, from some step to the end",
    happens="one warning a save, training continues; one message at the end; every published checkpoint is whole",
    exit_code=7,
)
def test_a_full_disk_and_one_that_cannot_be_written_leave_good_checkpoints(
    command: Callable[..., list[str]], tmp_path: Path, notice: Notice, on_a_small_disk: Any
) -> None:
    arguments = command("checkpoint.interval_steps=1", "checkpoint.keep_last=99", "train.num_steps=6")
    with notice:
        codes = on_a_small_disk(scenes.full_then_read_only, "1m", tmp_path, arguments)
    errors = said(tmp_path, "first", "second")
    assert codes == 2 * [notice.exit_code], errors
    assert "Traceback" not in errors
    failed = [line for line in errors.splitlines() if line.startswith("warning: no checkpoint of step")]
    first, second = [line for line in errors.splitlines() if line.startswith("error:")]
    assert [step for step, *_ in numbers(tmp_path / "kept")] == list(range(1, 7)), "training went on"
    assert "No space left on device" in failed[0]
    assert failed[0].endswith("training continues")
    assert "no checkpoint of step 6" in first
    assert "No space left on device" in first
    assert "Read-only file system" in second
    entry = newest_good(tmp_path / "kept" / "checkpoints").entry
    assert entry is not None
    verify_files(entry, entry.manifest.files)
    assert 1 <= entry.step < 6
    assert len(failed) == 6 - entry.step
    assert not list((tmp_path / "kept" / "checkpoints").glob(".*")), "what failed is deleted at once"


@pytest.mark.fault(
    "disk",
    "the disk of the run folder is full for a while, then SIGTERM on the full disk",
    happens="metrics.jsonl and TensorBoard catch up; the end says what is missing; the next start completes all",
    exit_code=7,
)
def test_records_catch_up_when_there_is_room_again(
    command: Callable[..., list[str]], tmp_path: Path, notice: Notice, on_a_small_disk: Any
) -> None:
    options = ("checkpoint.interval_steps=10", "checkpoint.keep_last=1", "metrics.tensorboard=true")
    given = command(*options)
    arguments = [f"run.dir={Path(text).name}" if text.startswith("run.dir=") else text for text in given]
    with notice:
        codes, last = on_a_small_disk(scenes.full_for_a_while, "4m", tmp_path, arguments)
    errors = said(tmp_path, "first", "full", "last")
    assert codes == [notice.exit_code, 7, 0], errors
    assert "Traceback" not in errors
    (line,) = [line for line in said(tmp_path, "first").splitlines() if line.startswith("error:")]
    assert "no checkpoint of step" in line
    assert "run/metrics.jsonl lacks" in line
    assert "No space left on device" in line
    (line,) = [line for line in said(tmp_path, "full").splitlines() if line.startswith("error:")]
    assert "run: No space left on device" in line or "No space left on device (run/" in line

    assert [step for step, *_ in numbers(tmp_path / "kept")] == list(range(1, last + 1)), "each step exactly once"
    assert len(list(read_records(tmp_path / "kept" / "metrics.jsonl"))) == last, "no half line"
    assert steps_with_scalars(tmp_path / "kept" / "tensorboard") == list(range(1, last + 1))


@pytest.mark.fault(
    "disk",
    "kill -9 in a save whose files fill the disk",
    happens="the next start deletes them before it writes anything, and goes on",
    exit_code=0,
)
def test_a_start_makes_room_before_it_needs_some(
    command: Callable[..., list[str]], tmp_path: Path, notice: Notice, on_a_small_disk: Any
) -> None:
    arguments = command("checkpoint.interval_steps=1", "checkpoint.async_save=false", "train.num_steps=3")
    fault = "kill rank=0 step=2 phase=write.3"
    with notice:
        codes, free = on_a_small_disk(scenes.leftovers_fill_the_disk, "2m", tmp_path, arguments, fault)
    assert free == 0
    assert codes == [137, notice.exit_code], said(tmp_path, "first", "second")


@pytest.mark.fault(
    "disk",
    "the disk of the log is full",
    happens="lines are left out of it, nothing else changes",
    exit_code=0,
)
def test_a_log_on_a_full_disk_ends_no_run(command: Callable[..., list[str]], tmp_path: Path, notice: Notice) -> None:
    environment = program_environment(tmp_path)
    with notice:
        code = Command(command("train.num_steps=3"), tmp_path, environment, Path("/dev/full")).wait(DEADLINE_S)
    assert code == notice.exit_code
    assert len(numbers(tmp_path / "run")) == 3
