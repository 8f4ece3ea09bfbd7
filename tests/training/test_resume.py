"""Runs that crash while saving or find other data: what they leave, report and resume from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.arch.layout import Layout
from mtrain.base import fault_points
from mtrain.base.environment import git_checkout
from mtrain.base.errors import DataError
from mtrain.checkpoint.store.directory import newest_good, publish, verify_files
from mtrain.checkpoint.store.manifest import CheckpointInfo
from mtrain.data.loader import StepLoader
from mtrain.training.changed import change_of_data
from tests.checkpoint.checkpoints import begin_staging
from tests.core.state.test_save_and_load import configured
from tests.fault_table import Notice
from tests.messages import refuses
from tests.pool import Pool
from tests.training import one_process
from tests.training.test_trainer import command, finished, numbers, start

__all__ = ["command", "start"]


def newest_step(run: Path) -> int:
    """Returns the step of the newest checkpoint, every byte of it read."""
    entry = newest_good(run / "checkpoints").entry
    assert entry is not None
    verify_files(entry, entry.manifest.files)
    return entry.step


@pytest.mark.fault(
    "ranks",
    "kill -9 of a rank while it writes a checkpoint during training",
    happens="the launcher names rank and signal; the same command resumes bit for bit from the step before",
    exit_code=5,
)
@pytest.mark.waits
@pytest.mark.parametrize("shard", ["optimizer", pytest.param("weights", marks=pytest.mark.nightly)])
def test_a_rank_killed_in_a_save_during_training_costs_the_steps_since_the_last_one(
    command: Callable[..., list[str]],
    start: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    notice: Notice,
    shard: str,
) -> None:
    run = tmp_path / "run"
    arguments = command("checkpoint.interval_steps=2", "checkpoint.self_test=true", f"layout.shard={shard}", ranks=2)
    monkeypatch.setenv(fault_points.VARIABLE, "kill rank=1 step=4 phase=write.3")
    with notice:
        code, output, errors = finished(start(arguments))
    assert code == notice.exit_code, errors
    assert "rank 1 was killed by SIGKILL" in errors
    assert "self-test: " in output
    assert "every bit the same on all ranks" in output
    assert newest_step(run) == 2
    before = numbers(run)
    assert len(before) >= 4

    monkeypatch.delenv(fault_points.VARIABLE)
    code, output, errors = finished(start(arguments))
    assert code == 0, errors
    assert f"loading {run / 'checkpoints' / 'step_00000002'}" in output
    assert numbers(run)[: len(before)] == before, "bit for bit"
    assert newest_step(run) == 6
    assert not list((run / "checkpoints").glob(".*")), "leftovers are deleted"
    manifest = json.loads((run / "checkpoints" / "step_00000006" / "mtrain.json").read_text())
    assert manifest["tokens"] == 6 * 4 * 16
    assert manifest["dataset"].startswith("mock-")
    checkout = git_checkout()
    assert manifest["git"] == (None if checkout is None else checkout._asdict())
    assert manifest["versions"].keys() >= {"mtrain", "torch", "megatron-core"}


STUCK = """
import time
from concurrent.futures import ThreadPoolExecutor

from mtrain.base.background import started
from mtrain.core.loss.functions.likelihood import next_token_loss as loss

# as a writer of checkpoints or exports whose disk never answers: a pool of a thread of the program
started(lambda: ThreadPoolExecutor(1).submit(time.sleep, 3600).result(), "stuck")
"""


@pytest.mark.fault(
    "disk",
    "a thread that writes hangs when the run ends (dead file system)",
    happens="the run ends without it",
    exit_code=0,
)
def test_a_thread_that_a_disk_holds_does_not_keep_the_run_from_ending(
    command: Callable[..., list[str]], start: Any, tmp_path: Path, notice: Notice
) -> None:
    (tmp_path / "stuck_losses.py").write_text(STUCK)
    with notice:
        code, output, errors = finished(start(command("loss.function=stuck_losses:loss", "train.num_steps=2")))
    assert code == notice.exit_code, errors
    assert "step 2/2" in output
    assert newest_step(tmp_path / "run") == 2


@pytest.mark.fault(
    "input",
    "the training data are others than those of the checkpoint",
    happens="resuming is refused",
    exit_code=3,
)
def test_resuming_on_other_data_is_refused(tmp_path: Path, notice: Notice) -> None:
    loader, other = (StepLoader(configured(**{"train.seed": seed}), 0, 1) for seed in (1, 2))

    def entry(step: int, dataset: str | None) -> Any:
        staging = begin_staging(tmp_path, step)
        (staging.path / "file").write_text("x")
        return publish(staging, CheckpointInfo(step=step, layout="", config_hash="", versions={}, dataset=dataset))

    assert change_of_data(entry(1, loader.fingerprint), loader, configured().checkpoint) is None
    assert change_of_data(entry(2, None), other, configured().checkpoint) is None
    with notice, refuses(DataError, "step_00000003", "initialize_from"):
        change_of_data(entry(3, loader.fingerprint), other, configured().checkpoint)
    assert notice.exit_code == DataError.exit_code


@pytest.mark.fault(
    "input",
    "config.yaml or metrics.jsonl of an earlier start is damaged: binary, deeply nested, a line without end",
    happens="one message names the file, and the line",
    exit_code=3,
)
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.yaml", b"\x80\xff\0", "config.yaml, which an earlier start wrote, is damaged"),
        ("metrics.jsonl", b'{"kind": "step", "step": ' + b"[" * 100_000 + b"\n", "metrics.jsonl, line 1: not a record"),
    ],
    ids=["config.yaml", "metrics.jsonl"],
)
def test_a_damaged_file_of_the_run_folder_is_one_message(
    command: Callable[..., list[str]], start: Any, tmp_path: Path, name: str, content: bytes, words: str, notice: Notice
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_bytes(content)
    with notice:
        code, _, errors = finished(start(command()))
    assert code == notice.exit_code, errors
    assert words in errors
    assert errors.count("error:") == 1
    assert "Traceback" not in errors


def test_the_test_hook_does_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fault_points.VARIABLE, raising=False)
    fault_points.fault_point("write.0", 0, 1)
    fault = fault_points.InjectedFault("full", 0, 1, "write.0")
    assert fault_points.InjectedFault.parsed(str(fault)) == fault
    monkeypatch.setenv(fault_points.VARIABLE, str(fault))
    fault_points.fault_point("write.0", 1, 1)
    with pytest.raises(OSError, match="No space left"):
        fault_points.fault_point("write.0", 0, 1)


def test_weights_are_drawn_by_a_run_that_begins_and_by_none_that_loads_them(pool: Pool, tmp_path: Path) -> None:
    sizes = {"model.num_layers": 1, "train.num_steps": 1, "metrics.tensorboard": False}
    first = configured(**{"run.dir": str(tmp_path / "first"), **sizes})
    start = {"checkpoint.initialize_from": str(tmp_path / "first")}
    other = configured(**{"run.dir": str(tmp_path / "other"), **sizes, **start})
    ((begun, resumed, started),) = pool.run(one_process.count_drawn, Layout(), [first, first, other])
    assert begun > 0
    assert resumed == started == 0
