"""Runs submitted by `mtrain launch slurm` to a real Slurm: two nodes with two ranks each.

Every job that was interrupted and went on must leave the metrics of one that was not, bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.fault_points import REACHED, VARIABLE, InjectedFault
from mtrain.base.heartbeat import Phase
from mtrain.metrics.record import OF_THE_MACHINE
from tests.paths import ROOT
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

CONFIG = """
model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 2, vocab_size: 64}
data: {kind: mock, seq_length: 16}
layout: {pp: 2}
train: {global_batch_size: 4, num_steps: 5, process_group_timeout_s: 60}
optimizer: {lr: 1.0e-3, schedule: constant}
valid: {interval_steps: 3, max_samples: 4}
checkpoint: {interval_steps: 2, async_save: false}
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Runs:
    """Submits runs to one cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "run.yaml").write_text(CONFIG)

    def submit(self, name: str, *options: str, environment: Mapping[str, str] | None = None) -> tuple[str, Path]:
        """The number of the job and its run folder, whose name has what a shell would trip over."""
        run_dir = self.folder / f"{name} $(x) %j"
        env_file = self.folder / f"{name}.env"
        env_file.write_text(environment_lines(environment or {}))
        env_file.chmod(0o600)
        command = [sys.executable, "-m", "mtrain", "launch", "slurm", "run.yaml", f"run.dir={run_dir}"]
        given = ["--nodes=2", "--ntasks-per-node=2", f"--env-file={env_file}", *options]
        done = subprocess.run(
            [*command, *given],
            cwd=self.folder,
            env={**self.cluster.environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return (run_dir / "submissions" / "0001" / "job_id").read_text().strip(), run_dir

    def ended(self, job: str, limit_s: float = 400) -> dict[str, str]:
        """What Slurm knows of the job when it has ended for good."""
        return self.cluster.wait_for_job(job, ENDED, limit_s)


def environment_lines(more: Mapping[str, str]) -> str:
    """Of an --env-file."""
    return "".join(f"{key}={value}\n" for key, value in {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **more}.items())


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """What each step has left, without what a clock says."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in OF_THE_MACHINE} for record in records]


def output(run_dir: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((run_dir / "logs").rglob("*.log")))


@pytest.fixture(scope="module")
def runs(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(slurm, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def uninterrupted(runs: Runs) -> list[dict[str, Any]]:
    job, run_dir = runs.submit("whole")
    assert (known := runs.ended(job))["JobState"] == "COMPLETED", output(run_dir)
    assert known["Restarts"] == "0"
    assert len(list((run_dir / "logs" / f"job-{job}-0").glob("rank_*.log"))) == 4
    assert len(metrics(run_dir)) == 6  # five steps and a validation
    return metrics(run_dir)


@pytest.mark.parametrize(
    ("phase", "step"),
    [(Phase.START, 0), (Phase.BUILD, 0), (Phase.FORWARD_BACKWARD, 2), (Phase.VALIDATION, 3), (Phase.SAVE, 2)],
    ids=str,
)
def test_a_run_asked_to_stop_goes_on_bit_for_bit(
    runs: Runs, uninterrupted: list[dict[str, Any]], phase: Phase, step: int
) -> None:
    reached = runs.folder / f"{phase}.reached"
    fault = str(InjectedFault("await_stop", rank=3, step=step, phase=phase))
    job, run_dir = runs.submit(phase, environment={VARIABLE: fault, REACHED: str(reached)})
    runs.cluster.wait(reached.exists, f"rank 3 in {phase}", 200)
    # a requeued job gets another environment: at the start the fault would be there again
    (runs.folder / f"{phase}.env").write_text(environment_lines({}))
    runs.cluster.run("scancel", "--batch", "--signal=USR1", job)
    known = runs.ended(job)
    assert (known["JobState"], known["Restarts"]) == ("COMPLETED", "1"), output(run_dir)
    assert metrics(run_dir) == uninterrupted


def test_a_signal_while_ranks_load_torch_costs_nothing(runs: Runs, uninterrupted: list[dict[str, Any]]) -> None:
    job, run_dir = runs.submit("early")
    # Slurm forgets a signal that comes before the script runs
    runs.cluster.wait((run_dir / "logs" / f"job-{job}-0").is_dir, "the script", 60)
    runs.cluster.run("scancel", "--batch", "--signal=USR1", job)
    known = runs.ended(job)
    assert (known["JobState"], known["Restarts"]) == ("COMPLETED", "1"), output(run_dir)
    assert metrics(run_dir) == uninterrupted


def test_a_cancelled_job_saves_and_stays_cancelled(runs: Runs) -> None:
    reached = runs.folder / "cancel.reached"
    fault = str(InjectedFault("await_stop", rank=0, step=3, phase=Phase.FORWARD_BACKWARD))
    job, run_dir = runs.submit("cancel", environment={VARIABLE: fault, REACHED: str(reached)})
    runs.cluster.wait(reached.exists, "rank 0 in step 3", 200)
    runs.cluster.run("scancel", job)
    runs.cluster.wait(lambda: (run_dir / "REQUEUE").exists(), "the ranks' marker", 60)
    known = runs.ended(job)
    assert (known["JobState"], known["Restarts"]) == ("CANCELLED", "0")
    assert (run_dir / "checkpoints" / "step_00000003").is_dir()


def test_a_lost_rank_is_retried_until_the_budget_is_spent(runs: Runs) -> None:
    fault = str(InjectedFault("kill", rank=1, step=3, phase=Phase.FORWARD_BACKWARD))
    job, run_dir = runs.submit("lost", "--max-retries=1", environment={VARIABLE: fault})
    known = runs.ended(job)
    assert (known["JobState"], known["Restarts"]) == ("FAILED", "1"), output(run_dir)
    assert "exit code 137; not tried again: 1 retries have brought no newer checkpoint than step_00000002" in output(
        run_dir
    )
    assert "n1 is not left out: the partition has too few others" in output(run_dir)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster
