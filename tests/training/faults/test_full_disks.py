"""Runs whose disk fills up: what they say, what they leave, and how they go on when there is room again.

Each disk is a tmpfs in a mount namespace of its own, so that no rights are needed and nothing stays mounted.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mtrain.base import fault_points
from mtrain.checkpoint.store.directory import newest_good
from mtrain.checkpoint.store.verification import verify_files
from mtrain.metrics.jsonl import read_records
from tests.fault_table import Notice
from tests.paths import ROOT
from tests.training.test_trainer import DEADLINE_S, command, numbers

__all__ = ["command"]

FUNCTIONS = """
wait_for() {  # $1 lines with $2 in file $3
    until [ "$(grep -c "$2" "$3" 2>/dev/null)" -ge "$1" ]; do sleep 0.1; done
}
fill() {  # and keeps the disk full, whatever is deleted
    while :; do cat /dev/zero >> run/filler; sleep 0.05; done 2>/dev/null & filler=$!
}
make_room() { kill $filler; wait $filler; rm run/filler; }
mkdir run
mount -t tmpfs -o size="$1" tmpfs run
shift
"""


def run_on_a_small_disk(script: str, size: str, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs bash in `folder`, where `run` is a disk of its own; the script's "$@" starts the run."""
    outer = [
        "unshare",
        "--map-root-user",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",  # a process reads what it holds from /proc
        "--kill-child",
        "bash",
        "-c",
        FUNCTIONS + script,
        "bash",
        size,
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        outer, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=True
    )


@pytest.fixture
def on_a_small_disk() -> Callable[[str, str, list[str], Path], subprocess.CompletedProcess[str]]:
    """Runs a script on a disk of its own, where the machine lets it mount one: tests/needs.py."""
    return run_on_a_small_disk


def steps_with_scalars(folder: Path) -> list[int]:
    """What TensorBoard shows."""
    return [event.step for event in EventAccumulator(str(folder)).Reload().Scalars("train/loss")]


FULL_AND_READ_ONLY = """
"$@"; echo "first exit code $?"
cp run/metrics.jsonl .
mount -o remount,bind,ro run  # bind: what a user without root may change
"$@"; echo "second exit code $?"
cp -a run kept
"""


@pytest.mark.fault(
    "disk",
    "the disk of the run folder is full, from some step to the end",
    happens="one warning a save, training goes on; one message at the end; every published checkpoint is whole",
    exit_code=7,
)
def test_a_full_disk_and_one_that_cannot_be_written_leave_good_checkpoints(
    command: Callable[..., list[str]], tmp_path: Path, notice: Notice, on_a_small_disk: Any
) -> None:
    arguments = command("checkpoint.interval_steps=1", "checkpoint.keep_last=99", "train.num_steps=12")
    with notice:
        outcome = on_a_small_disk(FULL_AND_READ_ONLY, "2m", arguments, tmp_path)
    assert f"first exit code {notice.exit_code}" in outcome.stdout, outcome.stderr
    assert f"second exit code {notice.exit_code}" in outcome.stdout, outcome.stderr
    assert "Traceback" not in outcome.stderr
    failed = [line for line in outcome.stderr.splitlines() if line.startswith("warning: no checkpoint of step")]
    first, second = [line for line in outcome.stderr.splitlines() if line.startswith("error:")]
    assert [step for step, *_ in numbers(tmp_path / "kept")] == list(range(1, 13)), "training went on"
    assert "No space left on device" in failed[0]
    assert failed[0].endswith("training goes on")
    assert "no checkpoint of step 12" in first
    assert "No space left on device" in first
    assert "Read-only file system" in second
    entry = newest_good(tmp_path / "kept" / "checkpoints").entry
    assert entry is not None
    verify_files(entry, entry.manifest.files)
    assert 1 <= entry.step < 12
    assert len(failed) == 12 - entry.step
    assert not list((tmp_path / "kept" / "checkpoints").glob(".*")), "what failed is deleted at once"


FULL_FOR_A_WHILE = """
"$@" train.num_steps=1000000 > out 2> err & pid=$!
wait_for 5 '"kind": "step"' run/metrics.jsonl
fill
wait_for 1 'could not write run/metrics.jsonl' err
wait_for 1 'could not write run/tensorboard' err
wait_for 1 'no checkpoint of step' err
make_room
wait_for 1 'run/metrics.jsonl has what was waiting' err
wait_for 1 'tfevents.* has what was waiting' err
fill
wait_for 2 'could not write run/metrics.jsonl' err
kill -TERM $pid
wait $pid; echo "first exit code $?"
python=$1; shift 7; set -- "$python" -m mtrain train "$@"  # from here on with one rank
"$@" train.num_steps=1 > /dev/null 2> full; echo "second exit code $?"
make_room
newest=$(ls -d run/checkpoints/step_* | tail -1 | sed 's/.*step_0*//')
"$@" train.num_steps=$((newest + 25)) > /dev/null 2> last; echo "third exit code $?"
echo "steps $((newest + 25))"
cp -a run kept
"""


@pytest.mark.fault(
    "disk",
    "the disk of the run folder is full for a while, then SIGTERM on the full disk",
    happens="metrics.jsonl and TensorBoard catch up; the end says what is missing; the next start completes all",
    exit_code=7,
)
def test_records_catch_up_when_there_is_room_again(
    command: Callable[..., list[str]], tmp_path: Path, notice: Notice, on_a_small_disk: Any
) -> None:
    arguments = command("checkpoint.interval_steps=10", "checkpoint.keep_last=1", "metrics.tensorboard=true", ranks=2)
    relative = [f"run.dir={Path(text).name}" if text.startswith("run.dir=") else text for text in arguments]
    with notice:
        outcome = on_a_small_disk(FULL_FOR_A_WHILE, "4m", relative, tmp_path)
    errors = "".join((tmp_path / name).read_text() for name in ("err", "full", "last"))
    assert f"first exit code {notice.exit_code}" in outcome.stdout, errors
    assert "second exit code 7" in outcome.stdout, errors
    assert "third exit code 0" in outcome.stdout, errors
    assert "Traceback" not in errors
    (line,) = [line for line in (tmp_path / "err").read_text().splitlines() if line.startswith("error:")]
    assert "no checkpoint of step" in line
    assert "run/metrics.jsonl lacks" in line
    assert "No space left on device" in line
    (line,) = [line for line in (tmp_path / "full").read_text().splitlines() if line.startswith("error:")]
    assert "run: No space left on device" in line or "No space left on device (run/" in line

    last = int(outcome.stdout.split("steps ")[1])
    assert [step for step, *_ in numbers(tmp_path / "kept")] == list(range(1, last + 1)), "each step exactly once"
    assert len(list(read_records(tmp_path / "kept" / "metrics.jsonl"))) == last, "no half line"
    assert steps_with_scalars(tmp_path / "kept" / "tensorboard") == list(range(1, last + 1))


LEFTOVERS_FILL_THE_DISK = """
"$@"; echo "first exit code $?"
left=$(echo run/checkpoints/.tmp-step_*)
cat /dev/zero > "$left"/rest 2>/dev/null
echo "left $(df --output=avail run | tail -1)"
unset MTRAIN_TEST_FAULT
"$@"; echo "second exit code $?"
"""


@pytest.mark.fault(
    "disk",
    "kill -9 in a save whose files fill the disk",
    happens="the next start deletes them before it writes anything, and goes on",
    exit_code=0,
)
def test_a_start_makes_room_before_it_needs_some(
    command: Callable[..., list[str]],
    tmp_path: Path,
    notice: Notice,
    on_a_small_disk: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(fault_points.VARIABLE, "kill rank=0 step=2 phase=write.3")
    arguments = command("checkpoint.interval_steps=1", "checkpoint.async_save=false", "train.num_steps=3")
    with notice:
        outcome = on_a_small_disk(LEFTOVERS_FILL_THE_DISK, "2m", arguments, tmp_path)
    assert "first exit code 137" in outcome.stdout
    assert "left 0" in " ".join(outcome.stdout.split())
    assert f"second exit code {notice.exit_code}" in outcome.stdout, outcome.stderr


@pytest.mark.fault(
    "disk",
    "the disk of the log is full",
    happens="lines are left out of it, nothing else changes",
    exit_code=0,
)
def test_a_log_on_a_full_disk_ends_no_run(command: Callable[..., list[str]], tmp_path: Path, notice: Notice) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"}
    with Path("/dev/full").open("w") as full, notice:
        code = subprocess.run(
            command("train.num_steps=3"), cwd=tmp_path, env=environment, stdout=full, stderr=full, timeout=DEADLINE_S
        ).returncode
    assert code == notice.exit_code
    assert len(numbers(tmp_path / "run")) == 3
