"""The scripts of launch/: correct bash, and a Slurm job that passes signals on and requeues itself only when asked to.

Slurm's own commands are stood in for by small scripts that write down how they were called.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = [*ROOT.glob("launch/*"), ROOT / "tests" / "run.sh", ROOT / ".ci" / "run"]

SRUN = """#!/bin/bash
printf '%s|' "$@" MASTER "$MASTER_ADDR" "$MASTER_PORT" > "$CALLS/arguments"
trap 'sleep 0.3; touch "$RUN_DIR/REQUEUE"; exit 0' USR1
[[ -n ${SRUN_CODE:-} ]] && exit "$SRUN_CODE"
touch "$CALLS/ready"
for _ in {1..300}; do sleep 0.1; done
exit 9
"""
SCONTROL = """#!/bin/bash
case $1 in
  show) printf 'n3\\nn4\\n' ;;
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
        return process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def test_arguments_reach_the_ranks_unchanged(tmp_path: Path) -> None:
    name = 'a "b" $c'
    assert finish(start(tmp_path, str(tmp_path), "x y.yaml", f"data.tokenizer={name}", SRUN_CODE="0")) == 0
    assert (tmp_path / "arguments").read_text() == (
        "--kill-on-bad-exit=1|python|-m|mtrain|train|x y.yaml|"
        f"data.tokenizer={name}|run.dir={tmp_path}|MASTER|n3|22345|"
    )
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_stopped_run_that_left_the_marker_is_requeued(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, str(tmp_path), "run.yaml")
    deadline = time.monotonic() + 20
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    assert finish(process) == 0
    assert (tmp_path / "requeued").read_text() == "712345\n"


def test_a_failed_run_is_not_requeued_and_its_exit_code_is_kept(tmp_path: Path) -> None:
    (tmp_path / "REQUEUE").touch()
    assert finish(start(tmp_path, str(tmp_path), "run.yaml", SRUN_CODE="4")) == 4
    assert not (tmp_path / "requeued").exists()
