"""A node that is lost while its job is requeued elsewhere: the old start comes back, or never does."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.heartbeat import read_beat
from mtrain.runs.goodput import goodput_of_run, read_starts
from tests.fault_table import Notice
from tests.training.test_trainer import (
    DEADLINE_S,
    command,
    finished,
    numbers,
    records,
    running_ranks,
    start,
    wait_for_step,
)

__all__ = ["command", "start"]


def wait_for_checkpoint(run: Path, step: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not (run / "checkpoints" / f"step_{step:08d}" / "mtrain.json").exists():
        assert time.monotonic() < deadline, "nothing is saved"
        time.sleep(0.02)


def content(folder: Path) -> dict[str, bytes]:
    """Returns everything that a start publishes."""
    parts = ("checkpoints", "ledger", "exports")
    files = [path for part in parts for path in (folder / part).rglob("*") if path.is_file()]
    # what it was writing when it was stopped may get written, or half deleted at its end, but is never read: the next
    # start deletes it
    files = [path for path in files if not path.parent.name.startswith((".tmp-", ".trash-"))]
    files += [folder / "metrics.jsonl", folder / "config.yaml", folder / ".lock", *folder.glob("REQUEUE")]
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.fault(
    "ranks",
    "a start that was stopped for long (a lost node) goes on while a later start has the folder",
    happens="it replaces nothing, and ends with the name of the later start",
    exit_code=6,
)
def test_an_old_start_that_comes_back_replaces_nothing(
    command: Any, start: Any, tmp_path: Path, notice: Notice
) -> None:
    run, saves = tmp_path / "run", "checkpoint.interval_steps=4"
    old = start(command(saves, "train.num_steps=3000"))
    wait_for_checkpoint(run, 4)
    (rank,) = running_ranks(run, 1)
    rank.suspend()
    # as a server does that has lost the node: the lock is free, though its holder has not ended
    (run / ".lock").unlink()
    new = start(command(saves, "train.num_steps=3000"))
    deadline = time.monotonic() + DEADLINE_S
    while (beat := read_beat(run / "heartbeats", 0)) is None or beat.start != 2 or beat.step == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    new.send_signal(15)
    code, _, errors = finished(new)
    assert code == 0, errors
    before = content(run)
    with notice:
        rank.resume()
        code, _, errors = finished(old)
    assert code == notice.exit_code, errors
    assert "was taken over by process" in errors
    assert "(start 2)" in errors
    assert "(start 1)" in errors
    assert errors.count("error:") == 1
    assert content(run) == before
    assert not (run / "failure.json").exists(), "the later start has not failed"
    beat = read_beat(run / "heartbeats", 0)
    assert beat is not None
    assert beat.start == 2


@pytest.mark.fault(
    "ranks",
    "kill -9 of all ranks of a node; the job starts again on half the ranks",
    happens="it goes on from the newest checkpoint with the losses of the uninterrupted run",
    exit_code=5,
)
@pytest.mark.waits
def test_a_lost_node_costs_steps_and_no_digit(command: Any, start: Any, tmp_path: Path, notice: Notice) -> None:
    run, saves = tmp_path / "run", "checkpoint.interval_steps=4"
    assert finished(start(command(saves, "train.num_steps=12", "train.micro_batch_size=1", run="straight")))[0] == 0
    first = start(command(saves, "train.num_steps=3000", "train.micro_batch_size=1", ranks=4))
    wait_for_checkpoint(run, 4)
    ranks = running_ranks(run, 4)
    with notice:
        for rank in ranks[2:]:
            rank.kill()
        code, _, errors = finished(first)
    assert code == notice.exit_code, errors
    assert errors.startswith(("error: rank 2 was killed by SIGKILL", "error: rank 3 was killed by SIGKILL"))
    steps = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))
    reached = records(run)[-1]["step"]
    assert reached >= steps[-1]
    again = max(12, steps[-1] + 2)
    code, output, errors = finished(
        start(command(saves, f"train.num_steps={again}", "train.micro_batch_size=1", ranks=2))
    )
    assert code == 0, errors
    straight, whole = numbers(tmp_path / "straight"), numbers(run)
    assert [one[0] for one in whole] == list(range(1, again + 1))
    for number in (1, 2):
        assert [one[number] for one in whole[:12]] == pytest.approx([one[number] for one in straight], rel=1e-5)
    goodput = goodput_of_run(run)
    assert goodput is not None
    assert goodput.restarts == 1
    accounts = read_starts(run / "starts")
    assert [(one.world_size, one.ended) for one in accounts] == [(4, "RankLostError"), (2, "done")]
    assert accounts[1].start_step == steps[-1]
    assert goodput.lost_steps == max(0, accounts[0].step - steps[-1])
    assert f"restarts 1, lost steps {goodput.lost_steps}" in output
    assert 0 < goodput.fraction < 1
    assert not (run / "failure.json").exists()
    (reported,) = (run / "failures" / "start_00001").glob("launcher_*.json")
    assert json.loads(reported.read_text())["exit_code"] == 5


def test_the_account_of_a_start_adds_up(command: Any, start: Any, tmp_path: Path) -> None:
    assert finished(start(command("valid.at_end=true", "valid.max_samples=2")))[0] == 0
    wait_for_step(tmp_path / "run", 6)
    (account,) = read_starts(tmp_path / "run" / "starts")
    steps = records(tmp_path / "run")
    assert account.trained_s == pytest.approx(sum(record["seconds"] for record in steps))
    assert account.saves == ((6, account.trained_s),)
    assert account.phases_s.keys() >= {"start", "build", "data", "forward_backward", "update", "validation", "save"}
    assert sum(account.phases_s.values()) == pytest.approx(account.written_s - account.began_s, abs=0.5)
