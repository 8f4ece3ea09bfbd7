"""The scripts of launch/: correct bash, and a Slurm job that Slurm's own signal requeues and scancel does not.

Small scripts replace Slurm's own commands, and record how they were called.
"""

import os
import re
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
printf '%s|' "$@" >> "$CALLS/steps"; echo >> "$CALLS/steps"
[[ -z ${SHOW_ENVIRONMENT:-} ]] || env > "$CALLS/environment"
[[ -n ${SRUN_TELLS:-} ]] && { sleep 0.05; printf '%s\n' "$SRUN_TELLS" > "$RUN_DIR/failure.txt"; }
[[ -n ${SRUN_SERVES:-} ]] && { sleep 0.05; touch "$RUN_DIR/service.json"; }
[[ -n ${SRUN_SAYS:-} ]] && printf '%s\n' "$SRUN_SAYS" >&2
[[ -n ${SRUN_CODE:-} ]] && exit "$SRUN_CODE"
[[ -n ${SRUN_STARTS_S:-} ]] && { touch "$CALLS/starting"; trap '' USR1; sleep "$SRUN_STARTS_S"; }
[[ -n ${SRUN_DIES:-} ]] || trap 'sleep 0.3; touch "$RUN_DIR/REQUEUE"; exit 0' USR1
touch "$CALLS/ready"
for _ in {1..300}; do sleep 0.1; done
exit 9
"""
SCONTROL = """#!/bin/bash
# Answers are drawn: a line of $CALLS/answers-show or $CALLS/answers-requeue for each question, then `ok`.
next() {
  local file=$CALLS/answers-$1
  answer=$(head -n 1 "$file" 2>/dev/null)
  [[ -z $answer ]] || sed -i 1d "$file"
  case ${answer:-ok} in
    away) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1 ;;
    garbage) echo "JobId=9 JobName=other JobState=COMPLETED Restarts=7"; exit 0 ;;
    hang) exec /bin/sleep 1000 ;;
    mute) exit 0 ;;
    forbidden) echo "Requested operation is presently disabled for job $SLURM_JOB_ID" >&2; exit 1 ;;
  esac
}
case $1-$2 in
  show-hostnames) printf 'n3\\nn4\\n' ;;
  show-job)
    next show
    [[ -z ${ARRAY:-} ]] || echo "JobId=712000 ArrayJobId=712000 ArrayTaskId=1 JobState=FAILED Restarts=5"
    state=${JOB_STATE:-RUNNING}
    [[ ! -e $CALLS/requeued ]] || state=COMPLETING
    echo "JobId=$4 ${ARRAY:+ArrayJobId=712000 ArrayTaskId=3 }JobState=$state Reason=None" \
      "Restarts=$(cat "$CALLS/requeued" 2>/dev/null | wc -l) PreemptTime=${PREEMPT_TIME:-None} ${FIELDS:-}" ;;
  update-*) [[ $2 != JobId= ]] || exit 1; echo "$3" >> "$CALLS/updated" ;;
  release-*) [[ -z $2 ]] || echo "$2" >> "$CALLS/released" ;; # without a job it does nothing, like Slurm
  requeue-* | requeuehold-*)
    next requeue
    [[ $answer == lie ]] || echo "$2" >> "$CALLS/requeued"
    [[ $answer != killed ]] || exit 143 ;;
esac
"""
SBATCH = """#!/usr/bin/env python3
# Says whether the job could start in $CLUSTER, as `sbatch --test-only` does: NODE=FEATURE... of partition p.
import os, re, sys
assert sys.argv[1] == "--test-only" and not [name for name in os.environ if name.startswith("SBATCH_")]
own = re.findall("^#SBATCH --(.+)$", open(sys.argv[-1]).read(), re.M)
asked = dict(one.split("=", 1) for one in [*own, *(word[2:] for word in sys.argv[2:-1])] if "=" in one)
cluster = dict(each.split("=") for each in os.environ["CLUSTER"].split())
left_out, needed = (set(filter(None, asked.get(name, "").split(","))) for name in ("exclude", "nodelist"))
usable = {node for node, feature in cluster.items() if asked.get("constraint", feature) == feature} - left_out
has_all = needed <= usable and len(usable) >= int(asked["nodes"]) and asked["partition"] == "p"
sys.exit(0 if has_all and asked.get("dependency") == "" else 1)
"""
SLEEP = """#!/bin/bash
[[ $1 == 5 || $1 == 10 ]] || exec /bin/sleep "$1" # pauses between two questions pass at once
"""
IMPATIENT = """#!/bin/bash
exec /usr/bin/timeout -s KILL 0.5 "${@:4}"
"""


def test_the_image_of_the_site_installs_the_packages_of_the_extra() -> None:
    (command,) = re.findall(r"^RUN (python -c .*) > /tmp/docs.txt", (ROOT / "launch" / "Dockerfile").read_text(), re.M)
    listed = subprocess.run(["bash", "-c", command], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert (
        listed.splitlines()
        == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_bash_can_read_it(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script]).returncode == 0


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """Runs the batch script, or the one in `folder`, as Slurm would, in a process group of its own."""
    own = folder / "job.sbatch"
    programs = {"srun": SRUN, "scontrol": SCONTROL, "sbatch": SBATCH, "sleep": SLEEP}
    for name, text in (programs | ({"timeout": IMPATIENT} if "IMPATIENT" in environment else {})).items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "712345", "SLURM_JOB_NODELIST": "n[3-4]", "CALLS": str(folder), "RUN_DIR": arguments[0]}
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", own if own.exists() else ROOT / "launch" / "slurm.sbatch", *arguments],
        env=os.environ | job | path | environment,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[bytes]) -> int:
    """Returns the exit code of a process; kills the rest of its process group where it does not end."""
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


@pytest.mark.parametrize("code", ["0", "1"])
def test_layers_are_certified_before_the_ranks_start(
    tmp_path: Path, code: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script = (ROOT / "launch" / "slurm.sbatch").read_text().replace("certify=    ", "certify=yes ")
    (tmp_path / "job.sbatch").write_text(script)
    assert finish(start(tmp_path, str(tmp_path), "x.yaml", SRUN_CODE=code)) == int(code)
    first, second = (tmp_path / "steps").read_text().splitlines()
    assert "--nodes=1|--ntasks=1|--ntasks-per-node=1|python|-m|mtrain|verify|backend|x.yaml|" in first
    assert first.endswith(f"run.dir={tmp_path}|--unless-certified|")
    assert "mtrain|train|x.yaml" in second, "whatever the comparison has found"
    assert ("verify backend ended with exit code 1" in capfd.readouterr().out) == (code == "1")


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


@pytest.mark.fault(
    "signals",
    "SIGTERM to the batch script of a job that Slurm has not cancelled",
    happens="the ranks save; nothing is requeued, and Slurm shows FAILED",
    exit_code=143,
)
@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGUSR1, signal.SIGTERM]], ids=str)
def test_a_script_that_is_ended_does_not_say_that_the_run_is_done(
    tmp_path: Path, numbers: list[signal.Signals], notice: Notice
) -> None:
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


@pytest.mark.fault("signals", "scancel", happens="the ranks save; nothing is requeued", exit_code=0)
@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "PREEMPTED", "TIMEOUT"])
def test_a_job_that_slurm_has_ended_is_left_to_slurm(tmp_path: Path, state: str, notice: Notice) -> None:
    """scancel signals the ranks in addition to the script."""
    process = start(tmp_path, str(tmp_path), "run.yaml", JOB_STATE=state)
    wait_for(tmp_path / "ready")
    with notice:
        process.send_signal(signal.SIGUSR1)
        code = finish(process)
    assert code == notice.exit_code
    assert not (tmp_path / "requeued").exists()


def stopped(folder: Path, **environment: str) -> int:
    """Returns the script's exit code where the ranks have left REQUEUE, as after a stop before the time limit."""
    run_dir = folder / "run"
    run_dir.mkdir(exist_ok=True)
    (folder / "requeued").unlink(missing_ok=True)
    (run_dir / "REQUEUE").write_text("stopped by SIGUSR1 at step 0\n")
    return finish(start(folder, str(run_dir), "run.yaml", **{"SRUN_CODE": "0", **environment}))


ANSWERS = {"show": ["ok", "away", "garbage", "mute"], "requeue": ["ok", "lie", "killed", "away", "forbidden", "mute"]}


@given(
    st.lists(st.sampled_from(ANSWERS["show"]), max_size=12),
    st.lists(st.sampled_from(ANSWERS["requeue"]), max_size=4),
    st.sampled_from([0, 5, 137]),
)
@settings(max_examples=10)
def test_a_script_says_that_a_job_is_requeued_only_where_slurm_has_done_it(
    tmp_path_factory: pytest.TempPathFactory, show: list[str], requeue: list[str], code: int
) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    (folder / "answers-show").write_text("\n".join(show))
    (folder / "answers-requeue").write_text("\n".join(requeue))
    ended = stopped(folder, SRUN_CODE=str(code))
    requeued, asked = (folder / "requeued").exists(), [answer for answer in requeue if answer not in ("ok", "killed")]
    if ended == 0:
        assert requeued
    elif requeued:  # all questions after it were in vain
        assert not (folder / "answers-show").read_text().replace("ok", "").strip() or len(show) >= 5
    else:
        assert ended == (code or 7)
    if not set(show) - {"ok"} and len(asked) < 3:
        assert ended == 0, "patient enough for a controller that says no twice"


@pytest.mark.fault(
    "signals",
    "a requeue that Slurm refuses, forbids (`--no-requeue`) or does not answer",
    happens="the ranks have saved; the log says why in one sentence, and Slurm shows FAILED",
    exit_code=7,
)
@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (
            {"requeue": ["forbidden"] * 3},
            "Slurm does not do it (Requested operation is presently disabled for job 712345)",
        ),
        ({"requeue": ["lie"] * 3}, "Slurm does not do it (no reason given)"),
        ({"requeue": ["away"] * 3}, "Slurm does not do it (slurm_load_jobs error: Unable to contact"),
        ({"show": ["away"] * 5}, "Slurm's controller does not answer; submit it again to go on"),
        ({"show": ["garbage"] * 5}, "Slurm's controller does not answer"),
        ({"show": ["ok", *["away"] * 5], "requeue": ["away"]}, "Slurm's controller does not answer (slurm_load_jobs"),
        ({"show": ["hang"] * 5}, "Slurm's controller does not answer"),
        ({"requeue": ["hang"] * 3}, "Slurm does not do it"),
    ],
    ids=str,
)
@pytest.mark.waits
def test_a_requeue_that_did_not_happen_is_no_success(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], answers: dict[str, list[str]], words: str, notice: Notice
) -> None:
    for question, given_answers in answers.items():
        (tmp_path / f"answers-{question}").write_text("\n".join(given_answers) + "\n")
    hangs = any("hang" in given_answers for given_answers in answers.values())
    with notice:
        code = stopped(tmp_path, **({"IMPATIENT": "1"} if hangs else {}))
    assert code == notice.exit_code
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert words in errors[0]


@pytest.mark.fault(
    "signals",
    "a job that is stopped at every start before it has saved a step",
    happens="the script requeues it max_retries times (here 3), then gives up",
    exit_code=7,
)
@pytest.mark.parametrize("earlier", [[], ["step_00000004"]], ids=str)
def test_stops_without_progress_have_a_budget(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], earlier: list[str], notice: Notice
) -> None:
    for name in earlier:
        (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
    with notice:
        codes = [stopped(tmp_path) for _ in range(4)]
    assert codes == [0, 0, 0, notice.exit_code]
    newest = "".join(earlier) or "none"
    assert f"3 retries have brought no newer checkpoint than {newest}" in capfd.readouterr().err


def test_stops_with_progress_cost_nothing(tmp_path: Path) -> None:
    for step in range(1, 6):
        (tmp_path / "run" / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
        assert stopped(tmp_path) == 0
    assert [stopped(tmp_path) for _ in range(4)] == [0, 0, 0, 7]


def test_stops_of_a_service_that_listened_cost_nothing(tmp_path: Path) -> None:
    """Stops cost nothing, whether or not a client has saved; failures do, unless one has saved since the last."""
    assert [stopped(tmp_path, SRUN_SERVES="1") for _ in range(5)] == [0] * 5
    assert [stopped(tmp_path) for _ in range(4)] == [0, 0, 0, 7], "starts that never listened"
    described = tmp_path / "run" / "served" / "a:train:0" / "weights" / "one" / "checkpoint.json"
    described.parent.mkdir(parents=True)
    for time_s in (1000, 2000):
        described.touch()
        os.utime(described, (time_s, time_s))  # saved again under the same name
        assert [stopped(tmp_path, SRUN_SERVES="1", SRUN_CODE="137") for _ in range(4)] == [0, 0, 0, 137]


def test_preemptions_cost_nothing(tmp_path: Path) -> None:
    assert [stopped(tmp_path, PREEMPT_TIME="2026-11-25T14:39:07") for _ in range(6)] == [0] * 6


def test_a_task_of_an_array_requeues_itself_alone(tmp_path: Path) -> None:
    """The task follows what Slurm says: a job that was submitted from a task of another array inherits that one's
    variables."""
    assert stopped(tmp_path, ARRAY="1", SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="9") == 0
    assert (tmp_path / "requeued").read_text() == "712000_3\n"
    assert stopped(tmp_path, SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="9") == 0
    assert (tmp_path / "requeued").read_text() == "712345\n"


WISHES = {
    "SLURM_CPU_BIND": "none",
    "SLURM_EXIT_IMMEDIATE": "0",
    "SLURM_HOSTFILE": "/x",
    "SLURM_KILL_BAD_EXIT": "0",
    "SLURM_STDERRMODE": "none",
    "SLURM_TIMELIMIT": "1",
    "SLURM_TEST_EXEC": "1",
    "SLURM_WORKING_DIR": "/",
    "SRUN_EXPORT_ENV": "NONE",
}


def test_wishes_for_srun_do_not_reach_it_but_those_of_the_env_file_do(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("SLURM_CPU_BIND=cores\n")
    script = (ROOT / "launch" / "slurm.sbatch").read_text().replace("env_file= ", f"env_file={tmp_path}/env ")
    (tmp_path / "job.sbatch").write_text(script)
    kept = {"SLURM_GPUS_PER_TASK": "1", "SLURM_CONF": "/etc/x", "SLURM_HINT": "nomultithread"}
    environment = {"SRUN_CODE": "0", "SHOW_ENVIRONMENT": "1", **WISHES, **kept}
    process = start(tmp_path, str(tmp_path), "x.yaml", **environment)
    assert finish(process) == 0
    seen = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line)
    assert {name: seen.get(name) for name in WISHES if name in seen} == {"SLURM_CPU_BIND": "cores"}
    assert {name: seen.get(name) for name in kept} == kept


@pytest.mark.fault(
    "signals",
    "an --env-file that is gone when the job runs",
    happens="the script says so; no rank starts without what stood in it",
    exit_code=7,
)
def test_a_lost_env_file_ends_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str], notice: Notice) -> None:
    script = (ROOT / "launch" / "slurm.sbatch").read_text().replace("env_file= ", "env_file=/nonexistent ")
    (tmp_path / "job.sbatch").write_text(script)
    with notice:
        code = finish(start(tmp_path, str(tmp_path), "x.yaml"))
    assert code == notice.exit_code
    assert "environment file /nonexistent cannot be read" in capfd.readouterr().err
    assert not (tmp_path / "arguments").exists()


@pytest.mark.waits
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
    """A rank that the watchdog has killed makes srun report 137; the run has lost a rank."""
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
