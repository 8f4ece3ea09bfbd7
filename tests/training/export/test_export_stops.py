"""Exports of a run that is stopped: they hold up nothing, lose nothing and cost no exit code."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mtrain.base import fault_points
from mtrain.checkpoint.store.directory import load_entry
from mtrain.checkpoint.store.steps import published_steps, step_name
from mtrain.hf.io.folder import HfFolder
from mtrain.runs.folder import RunFolder
from mtrain.training.export import Exporter, clean_staging, due_steps
from tests.fault_table import Notice
from tests.training.export.test_export import finished, run
from tests.training.test_trainer import DEADLINE_S, command, start, wait_for_step
from tests.training.test_trainer import finished as ended

__all__ = ["command", "finished", "run", "start"]

SAVES = ("checkpoint.interval_steps=2", "checkpoint.export_hf_every_steps=2", "checkpoint.keep_last=1")


def exported(run: RunFolder) -> list[int]:
    """Returns the steps whose folders are complete; nothing else lies in `exports`."""
    names = sorted(path.name for path in run.exports.iterdir())
    for name in names:
        assert HfFolder(run.exports / name).names(), name
    return [int(name.removeprefix("step_")) for name in names]


@pytest.mark.fault(
    "signals",
    "SIGTERM while an export hangs and others wait for it",
    happens="checkpoint, marker REQUEUE; the exports are left to the next start, their checkpoints stay",
    exit_code=0,
)
@pytest.mark.waits
def test_a_stop_waits_for_no_export_and_the_next_start_makes_all_of_them(
    command: Any, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: Notice
) -> None:
    run = RunFolder(tmp_path / "run")
    monkeypatch.setenv(fault_points.VARIABLE, "hang rank=0 step=2 phase=export.piece")
    process = start(command(*SAVES, "train.num_steps=100000"))
    wait_for_step(run.path, 7)
    with notice:
        process.send_signal(signal.SIGTERM)
        code, output, errors = ended(process)
    assert code == notice.exit_code, errors
    assert run.requeue_marker.exists()
    assert "Traceback" not in errors
    due = due_steps(run, 2)
    assert {2, 4, 6} <= set(due), "they are kept, though checkpoint.keep_last=1"
    assert f"exports left to the next start: {', '.join(map(step_name, due))}" in output

    monkeypatch.delenv(fault_points.VARIABLE)
    last = published_steps(run.checkpoints)[-1]
    code, output, errors = ended(start(command(*SAVES, f"train.num_steps={last}", "checkpoint.async_save=false")))
    assert code == 0, errors
    assert exported(run) == due
    assert not run.requeue_marker.exists()
    assert f"loading {run.checkpoints / step_name(last)}" in output


@pytest.mark.fault(
    "signals",
    "SIGTERM after the last step, while an export hangs",
    happens="marker REQUEUE; the next start only exports",
    exit_code=0,
)
@pytest.mark.waits
def test_a_stop_after_the_last_step_leaves_the_exports_to_the_next_start(
    command: Any, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: Notice
) -> None:
    run = RunFolder(tmp_path / "run")
    monkeypatch.setenv(fault_points.VARIABLE, "hang rank=0 step=2 phase=export.piece")
    process = start(command(*SAVES, "train.num_steps=4"))
    while "step_00000004 in " not in process.output():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    with notice:
        process.send_signal(signal.SIGTERM)
        code, _, errors = ended(process)
    assert code == notice.exit_code, errors
    assert run.requeue_marker.read_text() == "stopped by a signal before all checkpoints were exported\n"

    monkeypatch.delenv(fault_points.VARIABLE)
    code, _, errors = ended(start(command(*SAVES, "train.num_steps=4")))
    assert code == 0, errors
    assert exported(run) == [2, 4]
    assert not run.requeue_marker.exists()


@pytest.mark.fault(
    "disk",
    "every export fails, then SIGTERM",
    happens="a warning; checkpoint, marker REQUEUE; the next start tries the export again",
    exit_code=0,
)
def test_a_failed_export_does_not_change_how_a_stop_ends(
    command: Any, start: Any, tmp_path: Path, notice: Notice
) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.exports.write_text("a file in the way\n")
    process = start(command(*SAVES, "train.num_steps=100000"))
    deadline = time.monotonic() + DEADLINE_S
    while "step 2 is not exported" not in process.errors():
        assert time.monotonic() < deadline, "no export was tried"
        time.sleep(0.02)
    with notice:
        process.send_signal(signal.SIGTERM)
        code, output, errors = ended(process)
    assert code == notice.exit_code, errors
    assert "warning: step 2 is not exported: " in errors
    assert "Not a directory" in errors
    assert run.requeue_marker.exists()
    assert "exports left to the next start: step_" in output


@pytest.mark.fault(
    "disk",
    "the last export of a run fails",
    happens="one message; the next start tries it again",
    exit_code=7,
)
def test_a_failed_export_at_the_end_is_an_error(
    command: Any, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: Notice
) -> None:
    monkeypatch.setenv(fault_points.VARIABLE, "full rank=0 step=2 phase=export.piece")
    with notice:
        code, _, errors = ended(start(command(*SAVES, "train.num_steps=2")))
    assert code == notice.exit_code, errors
    assert errors.count("error: step 2 is not exported: ") == 1
    assert "Traceback" not in errors
    assert not list((tmp_path / "run" / "exports").iterdir()), "a full disk needs the room"


def test_an_export_that_is_stopped_ends_between_two_pieces_and_the_next_goes_on(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(fault_points.VARIABLE, "slow rank=0 step=2 phase=export.piece")
    exporter = Exporter(run, 2)
    exporter.poll()
    while not list(run.exports.glob(".step_00000002.partial/*.part")):
        time.sleep(0.01)
    exporter.stop()
    exporter.poll()
    assert exporter.finish() == [2]
    exporter.close()
    assert "exports left to the next start: step_00000002" in capsys.readouterr().out
    assert [path.name for path in run.exports.iterdir()] == [".step_00000002.partial"]

    monkeypatch.delenv(fault_points.VARIABLE)
    clean_staging(run, 2)
    assert list(run.exports.iterdir()), "what is due goes on where it stopped"
    next_start = Exporter(run, 2)
    assert next_start.finish() == []
    next_start.close()
    assert exported(run) == [2]
    assert "not exported" not in capsys.readouterr().err


def test_what_is_not_due_any_more_is_deleted_and_a_link_is_not_followed(run: RunFolder, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("")
    (run.exports / ".step_00000001.partial").mkdir(parents=True)
    (run.exports / ".step_00000003.partial").symlink_to(elsewhere)
    (run.exports / ".step_00000002.partial").symlink_to(elsewhere)
    clean_staging(run, 2)
    assert [path.name for path in run.exports.iterdir()] == [".step_00000002.partial"]
    exporter = Exporter(run, 2)
    exporter.finish()
    exporter.close()
    assert exported(run) == [2]
    assert [path.name for path in elsewhere.iterdir()] == ["mine"]
    assert load_entry(run.checkpoints / step_name(2)).step == 2
