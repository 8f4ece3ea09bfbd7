"""The scripts of launch/: correct bash, and a Slurm job that Slurm's own signal requeues and scancel does not.

Slurm's own commands are stood in for by small scripts that write down how they were called.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.fault_table import Notice
from tests.paths import ROOT

SCRIPTS = [
    *ROOT.glob("launch/*.s*"),
    ROOT / "tests" / "run.sh",
    ROOT / "tests" / "commit_message.sh",
    ROOT / ".ci" / "run",
]

SRUN = """#!/bin/bash
printf '%s|' "$@" MASTER "$MASTER_ADDR" "$MASTER_PORT" > "$CALLS/arguments"
[[ -n ${SRUN_TELLS:-} ]] && { sleep 0.05; printf '%s\n' "$SRUN_TELLS" > "$RUN_DIR/failure.txt"; }
[[ -n ${SRUN_CODE:-} ]] && exit "$SRUN_CODE"
[[ -n ${SRUN_STARTS_S:-} ]] && { touch "$CALLS/starting"; trap '' USR1; sleep "$SRUN_STARTS_S"; }
[[ -n ${SRUN_DIES:-} ]] || trap 'sleep 0.3; touch "$RUN_DIR/REQUEUE"; exit 0' USR1
touch "$CALLS/ready"
for _ in {1..300}; do sleep 0.1; done
exit 9
"""
SCONTROL = """#!/bin/bash
case $1 in
  show) [[ $2 == hostnames ]] && printf 'n3\\nn4\\n' || echo "JobId=$4 JobState=${JOB_STATE:-RUNNING} Reason=None" ;;
  requeue) echo "$2" > "$CALLS/requeued" ;;
esac
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_bash_can_read_it(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script]).returncode == 0


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """Runs the batch script as Slurm would, in a process group of its own."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "712345", "SLURM_JOB_NODELIST": "n[3-4]", "CALLS": str(folder), "RUN_DIR": arguments[0]}
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", ROOT / "launch" / "slurm.sbatch", *arguments],
        env=os.environ | job | path | environment,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; takes down what is left of its process group where it does not end."""
    try:
        return process.wait(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def test_arguments_reach_the_ranks_unchanged(tmp_path: Path) -> None:
    name = 'a "b" $c'
    assert finish(start(tmp_path, str(tmp_path), "x y.yaml", f"data.tokenizer={name}", SRUN_CODE="0")) == 0
    assert (tmp_path / "arguments").read_text() == (
        f"--kill-on-bad-exit=1|--export=ALL|--output={tmp_path}/logs/job-712345-0/rank_%t.log|--open-mode=append|"
        'bash|-c|trap "" USR1; exec "$@"|rank|python|-m|mtrain|train|x y.yaml|'
        f"data.tokenizer={name}|run.dir={tmp_path}|MASTER|n3|22345|"
    )
    assert not (tmp_path / "requeued").exists()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.02)


@pytest.mark.fault(
    "signals",
    "Slurm's USR1 before the time limit",
    happens="the ranks save; the script requeues the job",
    exit_code=0,
)
def test_a_run_that_slurm_asks_to_stop_is_requeued(tmp_path: Path, notice: Notice) -> None:
    process = start(tmp_path, str(tmp_path), "run.yaml")
    wait_for(tmp_path / "ready")
    with notice:
        process.send_signal(signal.SIGUSR1)
        code = finish(process)
    assert code == notice.exit_code
    assert (tmp_path / "requeued").read_text() == "712345\n"


@pytest.mark.fault("signals", "scancel", happens="the ranks save; nothing is requeued", exit_code=0)
@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGUSR1, signal.SIGTERM]], ids=str)
def test_a_cancelled_run_is_not_requeued(tmp_path: Path, numbers: list[signal.Signals], notice: Notice) -> None:
    process = start(tmp_path, str(tmp_path), "run.yaml")
    wait_for(tmp_path / "ready")
    with notice:
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.1)
        code = finish(process)
    assert code == notice.exit_code
    assert (tmp_path / "REQUEUE").exists(), "the ranks were asked to save"
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "PREEMPTED"])
def test_a_job_that_slurm_has_ended_is_left_to_slurm(tmp_path: Path, state: str) -> None:
    """scancel signals the ranks beside the script."""
    process = start(tmp_path, str(tmp_path), "run.yaml", JOB_STATE=state)
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGUSR1)
    assert finish(process) == 0
    assert not (tmp_path / "requeued").exists()


def test_a_signal_that_srun_forgets_is_repeated(tmp_path: Path) -> None:
    process = start(tmp_path, str(tmp_path), "run.yaml", SRUN_STARTS_S="1")
    wait_for(tmp_path / "starting")
    process.send_signal(signal.SIGUSR1)
    assert finish(process) == 0
    assert (tmp_path / "requeued").exists()


@pytest.mark.fault(
    "signals",
    "Slurm's USR1 before srun or a rank can handle it",
    happens="the script requeues the job that it ended",
    exit_code=0,
)
def test_a_run_that_the_signal_kills_before_it_began_is_requeued(tmp_path: Path, notice: Notice) -> None:
    process = start(tmp_path, str(tmp_path), "run.yaml", SRUN_DIES="1")
    wait_for(tmp_path / "ready")
    with notice:
        process.send_signal(signal.SIGUSR1)
        code = finish(process)
    assert code == notice.exit_code
    assert (tmp_path / "requeued").exists()


def test_a_failed_run_is_not_requeued_and_its_exit_code_is_kept(tmp_path: Path) -> None:
    (tmp_path / "REQUEUE").touch()
    assert finish(start(tmp_path, str(tmp_path), "run.yaml", SRUN_CODE="4")) == 4
    assert not (tmp_path / "requeued").exists()


@pytest.mark.fault(
    "signals",
    "a rank ends in the same way at every start of a job",
    happens="the script tries again max_retries times (here 3) without a newer checkpoint, then gives up",
    exit_code=5,
)
def test_the_same_end_at_every_start_is_tried_again_a_few_times(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], notice: Notice
) -> None:
    requeued = tmp_path / "requeued"
    job = {"SRUN_CODE": "137", "SRUN_TELLS": "error: rank 1 was ended by signal SIGSEGV"}
    with notice:
        for _ in range(3):
            assert finish(start(tmp_path, str(tmp_path), "run.yaml", **job)) == 0
            assert requeued.exists()
            requeued.unlink()
        code = finish(start(tmp_path, str(tmp_path), "run.yaml", **job))
    assert code == notice.exit_code
    assert not requeued.exists()
    assert "not tried again: 3 retries have brought no newer checkpoint than none" in capfd.readouterr().err


@pytest.mark.parametrize(("code", "ends_with"), [("3", 3), ("137", 5)])
def test_the_batch_script_shows_the_one_summary_of_a_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: str, ends_with: int
) -> None:
    """A rank that the watchdog has killed makes srun say 137; the run has lost a rank."""
    (tmp_path / "failure.txt").write_text("error: of an earlier start\n")
    rank = tmp_path / "logs" / "job-712345-0" / "rank_0.log"
    rank.parent.mkdir(parents=True)
    rank.write_text("error: of one rank of many\n")
    reported = "error: rank 1 is stopped, for 30 s, in save of step 3"
    job = {"SRUN_CODE": code, "SRUN_TELLS": reported, "JOB_STATE": "COMPLETING"}
    assert finish(start(tmp_path, str(tmp_path), "run.yaml", **job)) == ends_with
    errors = capfd.readouterr().err
    assert reported in errors
    assert errors.count("error:") == 1
    assert finish(start(tmp_path, str(tmp_path), "run.yaml", SRUN_CODE=code, JOB_STATE="COMPLETING")) == int(code)
    assert "of one rank of many" in capfd.readouterr().err, "where ranks have left no record"
