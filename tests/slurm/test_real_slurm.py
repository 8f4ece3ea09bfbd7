"""Runs submitted by `mtrain launch slurm` to a real Slurm: two nodes with a rank each, or two (TWO_A_NODE).

Every job that was interrupted and resumed must leave the metrics of one that was not, bit for bit.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.fault_points import REACHED, VARIABLE, InjectedFault
from mtrain.base.heartbeat import Phase
from mtrain.report.metrics.record import OF_THE_MACHINE
from tests.paths import ROOT
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]

CONFIG = """
model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 2, vocab_size: 64}
data: {kind: mock, seq_length: 16}
layout: {pp: 2}
train: {global_batch_size: 4, num_steps: 8, process_group_timeout_s: 60}
optimizer: {lr: 1.0e-3, schedule: constant}
valid: {interval_steps: 3, max_samples: 4}
checkpoint: {interval_steps: 2, async_save: false}
"""
TWO_A_NODE = "--ntasks-per-node=2"
"""Option of jobs that depend on it; each start of a rank takes seconds of a core."""
PATIENCE_S = 600.0
"""Time limit of waits that usually take seconds: a slow machine is no failure."""
SUSPENDED_S = 45
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Runs:
    """Submits runs to one cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "run.yaml").write_text(CONFIG)

    def submit(
        self,
        name: str,
        *options: str,
        environment: Mapping[str, str] | None = None,
        keep_environment: bool = False,
        submitter: Mapping[str, str] | None = None,
    ) -> tuple[str, Path]:
        """Returns the number of the job and its run folder, whose name has characters that need quoting in a shell."""
        run_dir = self.folder / f"{name} $(x) %j"
        if not keep_environment:
            self._write_environment(name, environment or {})
        command = [sys.executable, "-m", "mtrain", "launch", "slurm", "run.yaml", f"run.dir={run_dir}"]
        given = ["--nodes=2", "--ntasks-per-node=1", f"--env-file={self.folder / name}.env", *options]
        done = subprocess.run(
            [*command, *given],
            cwd=self.folder,
            env={**self.cluster.environment, "PYTHONPATH": str(ROOT), **(submitter or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return (run_dir / "submissions" / "0001" / "job_id").read_text().strip(), run_dir

    def hold_next(self, name: str, rank: int, step: int, phase: Phase) -> None:
        """Makes the next start of the job wait there until it is asked to stop."""
        fault = InjectedFault("await_stop", rank=rank, step=step, phase=phase)
        reached = self.reached(name, phase, step)
        self._write_environment(name, {VARIABLE: str(fault), REACHED: str(reached)})

    def hold_no_more(self, name: str) -> None:
        """Lets the next start of the job run without a wait."""
        self._write_environment(name, {})

    def reached(self, name: str, phase: str, step: int) -> Path:
        """Returns a file that exists once the job waits in this phase."""
        return self.folder / f"{name}-{phase}-{step}.reached"

    def _write_environment(self, name: str, more: Mapping[str, str]) -> None:
        env_file = self.folder / f"{name}.env"
        env_file.write_text(environment_lines(more))
        env_file.chmod(0o600)

    def ended(self, job: str, limit_s: float = PATIENCE_S) -> dict[str, str]:
        """Returns what Slurm knows of the job when it has ended for good."""
        return self.cluster.wait_for_job(job, ENDED, limit_s)


def environment_lines(more: Mapping[str, str]) -> str:
    """Returns the lines of an --env-file."""
    return "".join(f"{key}={value}\n" for key, value in {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **more}.items())


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns what each step has recorded, without times."""
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
    assert len(list((run_dir / "logs" / f"job-{job}-0").glob("rank_*.log"))) == 2
    assert len(metrics(run_dir)) == 10  # eight steps and two validations
    return metrics(run_dir)


PHASES = (
    (Phase.START, 0),
    (Phase.BUILD, 0),
    (Phase.FORWARD_BACKWARD, 1),
    (Phase.SAVE, 2),
    (Phase.VALIDATION, 6),
)
"""Phases and steps of stops. In a save or validation, the stop takes effect after the next step: resumes at 1, 3, 7."""


def test_a_job_asked_to_stop_in_every_phase_goes_on_bit_for_bit(
    runs: Runs, uninterrupted: list[dict[str, Any]]
) -> None:
    """One job is stopped six times in a row: while its ranks load torch, and then in each of PHASES."""
    job, run_dir = runs.submit("phases")
    # Slurm forgets a signal that comes before the script runs
    runs.cluster.wait((run_dir / "logs" / f"job-{job}-0").is_dir, "the script", PATIENCE_S)
    for restarts, (phase, step) in enumerate(PHASES, 1):
        # before the signal: the requeued job reads its environment when it starts
        runs.hold_next("phases", rank=1, step=step, phase=phase)
        runs.cluster.run("scancel", "--batch", "--signal=USR1", job)
        runs.cluster.wait(runs.reached("phases", phase, step).exists, f"rank 1 in {phase}", PATIENCE_S)
        assert runs.cluster.job(job)["Restarts"] == str(restarts)
    runs.hold_no_more("phases")
    runs.cluster.run("scancel", "--batch", "--signal=USR1", job)
    known = runs.ended(job)
    assert (known["JobState"], known["Restarts"]) == ("COMPLETED", str(len(PHASES) + 1)), output(run_dir)
    assert metrics(run_dir) == uninterrupted


def test_a_job_survives_what_a_cluster_does_in_a_night(runs: Runs, uninterrupted: list[dict[str, Any]]) -> None:
    """One job meets its time limit, a preemption, a new controller, a new slurmd, and the loss of a node."""
    cluster, held = runs.cluster, partial(runs.hold_next, "night", rank=0, phase=Phase.FORWARD_BACKWARD)
    held(step=1)
    job, run_dir = runs.submit("night", "--partition=low", "--time=60", keep_environment=True)
    cluster.wait(runs.reached("night", Phase.FORWARD_BACKWARD, 1).exists, "rank 0 in step 1", PATIENCE_S)

    held(step=2)
    # so near that Slurm asks for the end at once; the next attempt has all the time it needs
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={cluster.minutes(job) + 2}")
    cluster.wait((run_dir / "REQUEUE").exists, "the ranks' marker", PATIENCE_S)
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    cluster.wait(runs.reached("night", Phase.FORWARD_BACKWARD, 2).exists, "the time limit", PATIENCE_S)
    assert cluster.job(job)["Restarts"] == "1"

    held(step=3)
    urgent = cluster.submit("--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    cluster.wait(runs.reached("night", Phase.FORWARD_BACKWARD, 3).exists, "the preemption", PATIENCE_S)
    assert cluster.job(urgent)["JobState"] == "COMPLETED"
    assert cluster.job(job)["Restarts"] == "2"

    held(step=4)
    node = cluster.nodes_of(job)[-1]
    cluster.kill_node(node, with_tasks=False)
    cluster.start_node(node)
    cluster.kill_controller()
    cluster.signal_script(job, signal.SIGUSR1)
    cluster.wait((run_dir / "REQUEUE").exists, "the ranks' marker", PATIENCE_S)
    cluster.start_controller()
    cluster.wait(runs.reached("night", Phase.FORWARD_BACKWARD, 4).exists, "the end of the new controller", PATIENCE_S)
    assert cluster.job(job)["Restarts"] == "3"

    runs.hold_no_more("night")
    nodes = cluster.nodes_of(job)
    cluster.kill_node(nodes[-1], with_tasks=True)
    known = runs.ended(job)
    assert (known["JobState"], known["Restarts"]) == ("COMPLETED", "4"), output(run_dir)
    assert cluster.nodes_of(job) == sorted({"n3", "n4", "n5"} - {nodes[-1]})
    assert metrics(run_dir) == uninterrupted

    cluster.start_node(nodes[-1])  # tests after this one leave nodes out, and need another one
    cluster.wait(lambda: cluster.node_states()[nodes[-1]] == "idle", "the lost node", PATIENCE_S)


def test_a_cancelled_job_saves_and_stays_cancelled(runs: Runs) -> None:
    reached = runs.folder / "cancel.reached"
    fault = str(InjectedFault("await_stop", rank=0, step=3, phase=Phase.FORWARD_BACKWARD))
    job, run_dir = runs.submit("cancel", TWO_A_NODE, environment={VARIABLE: fault, REACHED: str(reached)})
    runs.cluster.wait(reached.exists, "rank 0 in step 3", PATIENCE_S)
    runs.cluster.run("scancel", job)
    runs.cluster.wait(lambda: (run_dir / "REQUEUE").exists(), "the ranks' marker", PATIENCE_S)
    known = runs.ended(job)
    assert (known["JobState"], known["Restarts"]) == ("CANCELLED", "0")
    assert (run_dir / "checkpoints" / "step_00000003").is_dir()
    # two cores a node, as sinfo says, for two ranks
    assert "\n#SBATCH --cpus-per-task=1\n" in (run_dir / "submissions" / "0001" / "job.sbatch").read_text()


def test_a_lost_rank_is_retried_until_the_budget_is_spent(runs: Runs) -> None:
    fault = str(InjectedFault("kill", rank=1, step=3, phase=Phase.FORWARD_BACKWARD))
    job, run_dir = runs.submit("lost", TWO_A_NODE, "--max-retries=1", environment={VARIABLE: fault})
    low = (TWO_A_NODE, "--max-retries=1", "--partition=low", "--nodes=1")
    excluding = runs.submit("excluding", *low, "--sbatch=exclude=n3", environment={VARIABLE: fault})
    bound = runs.submit("bound", *low, "--sbatch=nodelist=n3", environment={VARIABLE: fault})
    known = runs.ended(job)
    assert (known["JobState"], known["Restarts"]) == ("FAILED", "1"), output(run_dir)
    # srun ends with the code of the killed rank, or with that of a rank that missed it first
    spent = r"exit code (137|5); not tried again: 1 retries have brought no newer checkpoint than step_00000002"
    assert re.search(spent, output(run_dir)), output(run_dir)
    assert "n1 is not left out: Slurm could not start the job without it" in output(run_dir)
    known = runs.ended(excluding[0])
    left_out = runs.cluster.run("scontrol", "show", "hostnames", known["ExcNodeList"]).split()
    (last,) = runs.cluster.nodes_of(excluding[0])
    (first,) = {"n4", "n5"} - {last}  # Slurm chooses
    assert (known["Restarts"], left_out) == ("1", ["n3", first]), output(excluding[1])
    known = runs.ended(bound[0])
    assert (known["Restarts"], known["ReqNodeList"], known["ExcNodeList"]) == ("1", "n3", "(null)"), output(bound[1])
    assert "n3 is not left out: Slurm could not start the job without it" in output(bound[1])


REFUSES = """#!/bin/bash
[[ $1 != requeue ]] || { echo "slurm_requeue: Unable to contact slurm controller" >&2; exit 1; }
exec /usr/bin/scontrol "$@"
"""
SLOW = """#!/bin/bash
sleep 3
exec /usr/bin/scontrol "$@"
"""


def test_slurm_shows_what_became_of_jobs_that_were_asked_to_stop(runs: Runs) -> None:
    """Three jobs, each on its own node, are stopped before their first step: Slurm forbids the requeue of one, does not
    answer another, and answers the third slowly, which goes on until its retries are spent."""
    cluster, jobs = runs.cluster, {}
    for name, text in {"forbidden": "", "mute": REFUSES, "slow": SLOW}.items():
        (programs := runs.folder / f"{name}-bin").mkdir()
        if text:
            (programs / "scontrol").write_text(text)
            (programs / "scontrol").chmod(0o755)
        fault = str(InjectedFault("await_stop", rank=0, step=0, phase=Phase.START))
        held = {VARIABLE: fault, REACHED: str(runs.reached(name, Phase.START, 0))}
        held["PATH"] = f"{programs}:/usr/bin:/bin"
        given = ["--nodes=1", "--partition=low", "--max-retries=1", TWO_A_NODE]
        jobs[name] = runs.submit(name, *given, environment=held)
    cluster.run("scontrol", "update", f"JobId={jobs['forbidden'][0]}", "Requeue=0")
    for name, (job, _) in jobs.items():
        cluster.wait(runs.reached(name, Phase.START, 0).exists, f"{name} in its start", PATIENCE_S)
        runs.reached(name, Phase.START, 0).unlink()
        cluster.run("scancel", "--batch", "--signal=USR1", job)
    cluster.wait(runs.reached("slow", Phase.START, 0).exists, "the second start", PATIENCE_S)
    cluster.run("scancel", "--batch", "--signal=USR1", jobs["slow"][0])
    ends = {
        "forbidden": ("0", "Slurm does not do it (Requested operation is presently disabled"),
        "mute": ("0", "Slurm does not do it (slurm_requeue: Unable to contact slurm controller)"),
        "slow": ("1", "not tried again: 1 retries have brought no newer checkpoint than none"),
    }
    for name, (restarts, words) in ends.items():
        job, run_dir = jobs[name]
        known = runs.ended(job)
        assert (known["JobState"], known["ExitCode"], known["Restarts"]) == ("FAILED", "7:0", restarts), output(run_dir)
        assert words in output(run_dir)


ASKS_FOR_ANOTHER_JOB = {
    "SBATCH_ARRAY_INX": "0-3",
    "SBATCH_EXCLUSIVE": "1",
    "SBATCH_HOLD": "1",
    "SBATCH_JOB_NAME": "another",
    "SBATCH_NO_REQUEUE": "1",
    "SBATCH_OPEN_MODE": "truncate",
    "SBATCH_PARTITION": "high",
    "SBATCH_SIGNAL": "KILL@1",
    "SBATCH_TIMELIMIT": "1",
}
TASK = f"""#!/bin/bash
export PYTHONPATH={ROOT} PATH={Path(sys.executable).parent}:$PATH OMP_NUM_THREADS=1
set -a; source task-$SLURM_ARRAY_TASK_ID.env; set +a
exec bash {ROOT}/launch/slurm.sbatch task-$SLURM_ARRAY_TASK_ID run.yaml layout.pp=1 $MORE
"""


def test_suspended_and_held_jobs_tasks_of_an_array_and_late_jobs_end_as_slurm_says(
    runs: Runs, uninterrupted: list[dict[str, Any]]
) -> None:
    """Three jobs and an array run side by side, as each of them waits for seconds or minutes."""
    late, tasks, suspended = begin_late(runs), begin_array(runs), begin_suspended(runs)
    let_time_run_out(runs, *late)
    suspend(runs, suspended[0])
    stop_one_of_the_array(runs, tasks)
    resume_and_hold(runs, suspended[0])
    known = runs.ended(suspended[0])
    assert (known["JobState"], known["Restarts"]) == ("COMPLETED", "1"), output(suspended[1])
    assert metrics(suspended[1]) == uninterrupted
    known = runs.ended(late[0])
    assert (known["JobState"], known["Restarts"]) == ("TIMEOUT", "0"), output(late[1])


def begin_late(runs: Runs) -> tuple[str, Path]:
    """Starts a job whose save would take longer than is left: its rank hangs until the time limit."""
    fault = str(InjectedFault("hang", rank=0, step=3, phase=Phase.FORWARD_BACKWARD))
    given = ["--nodes=1", "--partition=low", "layout.pp=1", "train.process_group_timeout_s=900"]
    return runs.submit("late", *given, environment={VARIABLE: fault})


def let_time_run_out(runs: Runs, job: str, run_dir: Path) -> None:
    """Lets the time run out once the job's rank hangs."""
    runs.cluster.wait((run_dir / "checkpoints" / "step_00000002").is_dir, "the step before", PATIENCE_S)
    runs.cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={runs.cluster.minutes(job) + 1}")


def begin_array(runs: Runs) -> str:
    """Submits three tasks: two wait in their first step until they are asked to stop, one has a wrong configuration."""
    (runs.folder / "task.sh").write_text(TASK)
    fault = InjectedFault("await_stop", rank=0, step=1, phase=Phase.FORWARD_BACKWARD)
    (runs.folder / "task-1.env").write_text("MORE=train.num_steps=nothing")
    for number in (0, 2):
        reached = runs.reached(f"task-{number}", fault.phase, fault.step)
        (runs.folder / f"task-{number}.env").write_text(f"{VARIABLE}='{fault}' {REACHED}='{reached}'")
    given = ["--array=0-2", "--partition=low", "--signal=B:USR1@60", "--requeue", "--output=task-%a.log"]
    return runs.cluster.submit(*given, "task.sh", cwd=runs.folder)


def stop_one_of_the_array(runs: Runs, array: str) -> None:
    """Stops the last task, whose number is the whole array's, and requeues it alone; each ends as it should."""
    cluster, said = runs.cluster, runs.folder / "task-2.log"
    for number in (0, 2):
        reached = runs.reached(f"task-{number}", Phase.FORWARD_BACKWARD, 1)
        cluster.wait(reached.exists, f"task {number}", PATIENCE_S)
    (runs.folder / "task-2.env").write_text("")
    cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_2")
    known = runs.ended(f"{array}_2")
    assert (known["JobState"], known["Restarts"]) == ("COMPLETED", "1"), said.read_text()
    known = runs.ended(f"{array}_1")
    assert (known["JobState"], known["ExitCode"], known["Restarts"]) == ("FAILED", "2:0", "0")
    known = cluster.job(f"{array}_0")
    assert (known["JobState"], known["Restarts"]) == ("RUNNING", "0")
    cluster.run("scancel", f"{array}_0")
    known = runs.ended(f"{array}_0")
    assert (known["JobState"], known["Restarts"]) == ("CANCELLED", "0")


def begin_suspended(runs: Runs) -> tuple[str, Path]:
    """Submits a job whose submitter's variables ask for another one; its ranks come to wait for one of them."""
    runs.hold_next("suspended", rank=0, step=3, phase=Phase.FORWARD_BACKWARD)
    given = ["--partition=debug", "--time=60", f"train.process_group_timeout_s={SUSPENDED_S - 5}"]
    job, run_dir = runs.submit("suspended", *given, keep_environment=True, submitter=ASKS_FOR_ANOTHER_JOB)
    known = runs.cluster.job(job)
    assert (known["Partition"], known["TimeLimit"], known["Requeue"]) == ("debug", "01:00:00", "1")
    assert "ArrayJobId" not in known
    assert known["JobName"].startswith("suspended")
    assert known["OverSubscribe"] == "OK"
    return job, run_dir


def suspend(runs: Runs, job: str) -> None:
    """Suspends the job while all other ranks wait for rank 0."""
    runs.cluster.wait(runs.reached("suspended", Phase.FORWARD_BACKWARD, 3).exists, "rank 0 in step 3", PATIENCE_S)
    runs.cluster.run("scontrol", "suspend", job)


def resume_and_hold(runs: Runs, job: str) -> None:
    """Resumes the job after longer than ranks may wait for each other; the administrator holds what is requeued."""
    cluster = runs.cluster
    end = datetime.fromisoformat(cluster.job(job)["SuspendTime"]) + timedelta(seconds=SUSPENDED_S)
    cluster.wait(lambda: datetime.now() > end, "the end of the suspension", PATIENCE_S)
    assert cluster.job(job)["JobState"] == "SUSPENDED"
    runs.hold_no_more("suspended")
    cluster.run("scontrol", "resume", job)
    cluster.run("scontrol", "hold", job)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    known = cluster.wait_for_job(job, ["PENDING", *ENDED], PATIENCE_S)
    assert (known["JobState"], known["Reason"], known["Restarts"]) == ("PENDING", "JobHeldAdmin", "1")
    cluster.run("scontrol", "release", job)


STEPS = f"""#!/bin/bash
export PYTHONPATH={ROOT} OMP_NUM_THREADS=1
step() {{ srun --exact -N2 -n2 -c1 {sys.executable} -m mtrain train run.yaml "$@"; }}
step run.dir=first > first.log 2>&1 & first=$!
step run.dir=second train.seed=7 > second.log 2>&1 & second=$!
wait $first && wait $second && step run.dir=alone > alone.log 2>&1
"""


def test_two_steps_of_one_allocation_train_as_one_alone(runs: Runs) -> None:
    (runs.folder / "steps.sh").write_text(STEPS)
    job = runs.cluster.submit("-N2", "-n4", "--ntasks-per-node=2", "steps.sh", cwd=runs.folder)
    known = runs.ended(job)
    logs = [(runs.folder / f"{name}.log") for name in ("first", "second", "alone")]
    assert known["JobState"] == "COMPLETED", [log.read_text()[-2000:] for log in logs if log.exists()]
    first, second, alone = (metrics(runs.folder / log.stem) for log in logs)
    assert first == alone
    assert second != alone, "another seed"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # jobs in `low` give way to those in `high`, and get time to save; a site may requeue only those that ask for it
    site = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", "JobRequeue": "0"}
    partitions = (
        "debug Nodes=n1,n2 Default=YES",
        "low Nodes=n3,n4,n5 PriorityTier=1 GraceTime=60",
        "high Nodes=n3,n4,n5 PriorityTier=10",
    )
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster", 5, 2, site, partitions) as cluster:
        yield cluster
