"""`mtrain launch slurm`: what it refuses, what it writes, and that nothing a user gives becomes shell code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.base.errors import ConfigError
from mtrain.launch.slurm.options import SlurmOptions, container_command, runtime_named
from mtrain.launch.slurm.submit import (
    TEMPLATE,
    SlurmJob,
    differences,
    main_path,
    prepare,
    render,
    signal_seconds,
)
from mtrain.runs.goodput import RunStart, write_start
from tests.fault_table import Notice
from tests.messages import check_message, refuses
from tests.paths import ROOT
from tests.warm import completed

CONFIG = """
model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 2, vocab_size: 64}
data: {kind: mock, seq_length: 16}
train: {global_batch_size: 4, num_steps: 4}
optimizer: {lr: 1.0e-3, schedule: constant}
"""
HOSTILE = ['x"; touch F; echo "', "$(touch F)", "`touch F`", "a b'c", "*", "-x", "\\", "$HOME", "a;b&c|d>e"]

SBATCH = """#!/bin/bash
printf '%s\\n' "$@" > calls
[[ -z ${REFUSES:-} ]] || { echo "sbatch: error: invalid partition specified: x" >&2; exit 1; }
echo "4711;cluster"
"""


def job(folder: Path, config: list[str] | None = None, options: SlurmOptions | None = None) -> SlurmJob:
    return SlurmJob(options or SlurmOptions(2), folder / "run", folder, config or ["a.yaml"], sys.executable, 300)


def settings(script: str, folder: Path, *names: str) -> list[str]:
    """Returns the words that bash makes of each of the script's settings, one a line."""
    head, _ = script.split("# --- from here on")
    show = "".join(f'\nprintf "%s\\n" "${{{name}[@]}}"' for name in names)
    done = subprocess.run(["bash", "-c", head + show], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.fault(
    "signals",
    "shell code in paths and values given to `mtrain launch slurm`",
    happens="they reach the ranks as they are; nothing is run",
    exit_code=0,
)
def test_no_value_becomes_shell_code(folder: Path, text: str, notice: Notice) -> None:
    values = [f"run.name={text}", text]
    given = job(folder, values, SlurmOptions(2, container=text, container_runtime="apptainer", mounts=(text,)))
    script = render(given)
    with notice:
        assert settings(script, folder, "config") == values
        assert text in settings(script, folder, "command")
    assert sorted(path.name for path in folder.iterdir()) == ["run.yaml"], "something was run"


@pytest.mark.parametrize("text", ['x"; touch F; echo "', "x\ntouch F", "a b", "", "x" * 65, "é"])
def test_a_job_name_is_a_name(text: str) -> None:
    with refuses(ConfigError, "--name"):
        SlurmOptions(1, name=text)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"partition": "a\n#SBATCH --wrap=x"}, "--partition"),
        ({"account": "a b"}, "--account"),
        ({"time": "1 day"}, "--time"),
        ({"nodes": 0}, "--nodes"),
        ({"gpus_per_node": 8, "gpus_per_task": 1}, "--gpus-per-task"),
        ({"mounts": ("/data",)}, "--container"),
        ({"container": "image\nx"}, "--container"),
        ({"more": ("wrap=rm",)}, "--wrap"),
        ({"more": ("array=0-3",)}, "--array"),
        ({"more": ("arr=0-3",)}, "--array"),
        ({"more": ("no-req",)}, "--no-requeue"),
        ({"more": ("wait",)}, "--wait"),
        ({"more": ("comment=a b",)}, "comment"),
        ({"more": ("--reservation=x",)}, "--reservation"),
        ({"env_file": Path("/nonexistent")}, "/nonexistent"),
        ({"max_retries": -1}, "--max-retries"),
    ],
    ids=str,
)
def test_what_slurm_would_not_take_is_refused(options: dict[str, object], fact: str) -> None:
    with refuses(ConfigError, fact):
        SlurmOptions(**{"nodes": 1, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "mode", "fact"), [("A=1\nB", 0o600, "line 2"), ("A=1", 0o644, "chmod 600")])
def test_an_env_file_that_would_not_work_is_refused(tmp_path: Path, text: str, mode: int, fact: str) -> None:
    (path := tmp_path / "env").write_text(text)
    path.chmod(mode)
    with refuses(ConfigError, fact):
        SlurmOptions(1, env_file=path)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("24:00:00", 86400),
        ("2-12", 216000),
        ("1-0:30", 88200),
        ("UNLIMITED", None),
        (None, None),
    ],
)
def test_the_time_limit_is_read_as_slurm_reads_it(text: str | None, seconds: int | None) -> None:
    assert SlurmOptions(1, time=text).time_limit_s == seconds


def test_the_signal_comes_as_early_as_a_save_needs() -> None:
    assert signal_seconds(None, None) == 300
    assert signal_seconds(None, 120) == 40, "a third of a short job"
    assert signal_seconds(600, 86400) == 1320
    with refuses(ConfigError):
        signal_seconds(600, 1800)


SECONDS = st.floats(0, 4000)


@given(SECONDS | st.none(), SECONDS, SECONDS, st.integers(1, 400))
def test_a_time_limit_holds_a_start_a_step_and_a_save(
    save_s: float | None, start_s: float, step_s: float, minutes: int
) -> None:
    """The signal may come in the middle of a step, and up to a minute late."""
    saving_s = 0.0 if save_s is None else save_s
    try:
        ahead = signal_seconds(save_s, 60 * minutes, start_s, step_s)
    except ConfigError as refusal:
        found = re.search(r"give at least (\d+) minutes", str(refusal))
        assert found is not None
        assert minutes < int(found[1])
        signal_seconds(save_s, 60 * int(found[1]), start_s, step_s)
    else:
        assert ahead >= step_s + saving_s + 60
        assert 60 * minutes - ahead >= start_s + step_s - 1


@pytest.mark.parametrize(("ranks", "code"), [(2, 2), (4, 0)])
def test_a_time_limit_that_the_runs_own_pace_does_not_fit_is_refused(folder: Path, ranks: int, code: int) -> None:
    """What another number of ranks took says nothing."""
    (starts := folder / "runs" / "a" / "starts").mkdir(parents=True)
    took = {"start": 60.0, "build": 400.0}
    start = RunStart(1, 0.0, 1.0, "n1", "1-0", 2, start_step=3, step=5, trained_s=800.0, phases_s=took)
    write_start(starts, start)
    done = launch(folder, "run.dir=runs/a", f"--nodes={ranks}", "--time=15", "--dry-run")
    assert done.returncode == code
    if code:
        check_message(done.stderr, "--time is 900 s", "460 s for its latest start, 400 s for a step", "24")


def test_an_unknown_container_runtime_is_refused() -> None:
    with refuses(ConfigError):
        runtime_named("docker")


def test_ranks_follow_from_gpus() -> None:
    options = SlurmOptions(2, gpus_per_node=8, cpus_per_task=12, partition="gpu", time="8:00:00", more=("exclusive",))
    assert options.num_ranks == 16
    assert list(options.directives()) == [
        "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=12", "--partition=gpu",
        "--time=8:00:00", "--exclusive",
    ]  # fmt: skip
    assert SlurmOptions(2, gpus_per_task=1, tasks_per_node=4).num_ranks == 8


def test_containers_start_as_each_runtime_wants() -> None:
    pyxis = SlurmOptions(1, container="docker://x/y:1", mounts=("/data", "/a:/b:ro"))
    assert container_command(pyxis, "/venv/python", Path("/home/me")) == (
        [
            "--container-image=docker://x/y:1",
            "--container-mounts=/home/me:/home/me,/data:/data,/a:/b:ro",
            "--container-workdir=/home/me",
        ],
        ["python", "-m", "mtrain"],
    )
    apptainer = SlurmOptions(1, gpus_per_node=8, container="x.sif", container_runtime="apptainer", mounts=("/data",))
    _, command = container_command(apptainer, "/venv/python", Path("/home/me"))
    assert " ".join(command) == (
        "apptainer exec --nv --bind /home/me --bind /data --pwd /home/me x.sif python -m mtrain"
    )
    assert container_command(SlurmOptions(1), "/venv/python", Path("/"))[1] == ["/venv/python", "-m", "mtrain"]


def test_the_script_by_hand_has_the_same_body(tmp_path: Path) -> None:
    marker = "# --- from here on the same in every job ---"
    assert render(job(tmp_path)).split(marker)[1] == TEMPLATE.read_text().split(marker)[1]
    assert TEMPLATE.samefile(ROOT / "launch" / "slurm.sbatch")


def test_a_wrong_configuration_is_found_before_the_queue(folder: Path) -> None:
    with refuses(ConfigError, "num_stepz"):
        prepare([folder / "run.yaml"], ["train.num_stepz=5"], SlurmOptions(2))
    with refuses(ConfigError):
        prepare([folder / "run.yaml"], ["run.dir=runs/x", "layout.tp=3"], SlurmOptions(2))
    with refuses(ConfigError, "run.dir"):
        prepare([folder / "run.yaml"], ['run.dir=runs/"x'], SlurmOptions(2))
    assert not (folder / "runs").exists()


NO_CONTROLLER = "#!/bin/bash\necho 'Unable to contact slurm controller' >&2\nexit 1\n"


def install(folder: Path, programs: Mapping[str, str]) -> None:
    """Installs stand-ins for commands of Slurm."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def launch(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # no command of a real Slurm is asked: it may look for its controller for a minute
    stand_ins = {"sbatch": SBATCH, "scontrol": NO_CONTROLLER, "squeue": NO_CONTROLLER, "sinfo": NO_CONTROLLER}
    install(folder, {name: text for name, text in stand_ins.items() if not (folder / name).exists()})
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mtrain", "launch", "slurm", "run.yaml", *arguments]
    return completed(command, folder, {**os.environ, **path, **environment})


def test_a_submission_is_frozen_and_the_next_one_shows_what_differs(folder: Path) -> None:
    first = launch(folder, "run.dir=runs/a b", "--nodes=2", "--partition=gpu")
    assert first.returncode == 0, first.stderr
    frozen = folder / "runs" / "a b" / "submissions" / "0001"
    assert (folder / "calls").read_text().splitlines() == ["--parsable", str(frozen / "job.sbatch")]
    assert (frozen / "1-run.yaml").read_text() == CONFIG, "the job reads this, whatever is changed while it waits"
    assert str(frozen / "1-run.yaml") in (frozen / "job.sbatch").read_text()
    assert "global_batch_size: 4" in (frozen / "config.yaml").read_text()
    assert json.loads((frozen / "program.json").read_text())["versions"]["mtrain"]
    assert (frozen / "job_id").read_text() == "4711\n"
    assert (folder / "runs" / "a b" / "logs").is_dir(), "else Slurm fails the job without a log"
    assert first.stdout == f"job 4711: 2 ranks on 2 nodes, from {frozen / 'job.sbatch'}\n"

    second = launch(folder, "run.dir=runs/a b", "--nodes=2", "--partition=gpu", "train.micro_batch_size=2")
    changed = [line for line in second.stdout.splitlines() if line.startswith(("+", "-")) and line[1] not in "+-"]
    assert any(line == "+  micro_batch_size: 2" for line in changed), second.stdout
    assert len(changed) <= 4, changed


def test_what_slurm_refuses_leaves_nothing(folder: Path) -> None:
    refused = launch(folder, "run.dir=runs/a", "--nodes=2", REFUSES="1")
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: Slurm refuses the job (sbatch: error: invalid partition specified: x); change the "
        "option that it names\n"
    )
    assert not (folder / "runs" / "a" / "submissions" / "0001").exists()


def test_a_dry_run_writes_nothing(folder: Path) -> None:
    shown = launch(folder, "run.dir=runs/a", "--nodes=2", "--dry-run")
    assert shown.stdout.startswith("#!/usr/bin/env bash\n")
    assert "#SBATCH --nodes=2" in shown.stdout
    for fact in ("2 ranks", "parameters"):
        assert fact in shown.stderr
    assert "hours" not in shown.stderr, "no GPU is named"
    assert "hours on 2 x h100" in launch(folder, "run.dir=runs/a", "--nodes=2", "--dry-run", "--gpu=h100").stderr
    for options, said in (
        ([], "not compared with the table; add --gpu h100, or --gpu-memory 80GiB"),
        (["--gpu-memory=80GiB"], "fits: the heaviest rank needs"),
        (["--gpu=h100", "--gpu-memory=0.001MiB"], "does not fit: the heaviest rank needs"),
    ):
        assert said in launch(folder, "run.dir=runs/a", "train.device=auto", "--nodes=2", "--dry-run", *options).stderr
    assert not (folder / "runs").exists()
    assert not (folder / "calls").exists()


def test_secrets_of_trackers_that_a_job_would_lack_are_named(folder: Path) -> None:
    tracked = ("run.dir=runs/a", "metrics.trackers=[wandb]", "--nodes=2", "--dry-run", "--without-files")
    shown = launch(folder, *tracked, WANDB_API_KEY="k3y9x")
    assert "note: WANDB_API_KEY is set in this shell" in shown.stderr
    assert "--env-file" in shown.stderr
    assert "k3y9x" not in shown.stderr + shown.stdout
    (folder / "secrets").write_text("WANDB_API_KEY=k3y9x\n")
    (folder / "secrets").chmod(0o600)
    assert "WANDB" not in launch(folder, *tracked, "--env-file=secrets", WANDB_API_KEY="k3y9x").stderr
    assert "WANDB" not in launch(folder, "run.dir=runs/a", "--nodes=2", "--dry-run", WANDB_API_KEY="k3y9x").stderr


def test_without_slurm_it_says_so(folder: Path) -> None:
    (empty := folder / "bin").mkdir()
    command = [sys.executable, "-m", "mtrain", "launch", "slurm", "run.yaml", "run.dir=runs/a", "--nodes=2"]
    environment = {"PATH": str(empty), "PYTHONPATH": str(ROOT), "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert "sbatch is not on PATH" in done.stderr


@pytest.mark.fault(
    "input",
    "a corpus that is not there, given to `mtrain launch slurm`",
    happens="refused on the login node; nothing is submitted",
    exit_code=3,
)
def test_files_are_looked_at_before_the_queue(folder: Path, notice: Notice) -> None:
    corpus = ["data.kind=indexed", "data.train=[{path: nothing}]", "run.dir=runs/a", "--nodes=1"]
    with notice:
        refused = launch(folder, *corpus)
    assert (refused.returncode, "nothing.idx" in refused.stderr) == (notice.exit_code, True), refused.stderr
    assert not (folder / "calls").exists()
    assert launch(folder, *corpus, "--without-files").returncode == 0


def shown(**changes: str) -> str:
    """Returns the output of `scontrol show job -o` of Slurm 22.05 for a job of `SlurmOptions(2, ...)`."""
    fields = {
        "JobId": "4711", "JobName": "n", "JobState": "PENDING", "Account": "team", "QOS": "(null)", "Requeue": "1",
        "TimeLimit": "1-00:00:00", "Partition": "gpu", "NumNodes": "2-2", "NumCPUs": "4", "NumTasks": "4",
        "CPUs/Task": "1", "NtasksPerN:B:S:C": "2:0:*:*", "Features": "(null)", **changes,
    }  # fmt: skip
    return " ".join(f"{name}={value}" for name, value in fields.items()) + "\n"


GIVEN = SlurmOptions(2, tasks_per_node=2, partition="gpu", account="Team", time="24:00:00", name="n")
CHANGED = {
    "JobName": "x", "Requeue": "0", "TimeLimit": "12:00:00", "Partition": "debug", "NumNodes": "1", "NumTasks": "8",
    "NtasksPerN:B:S:C": "0:0:*:*", "Account": "other", "ArrayJobId": "4711",
}  # fmt: skip


@given(st.sets(st.sampled_from(sorted(CHANGED))))
def test_every_option_that_slurm_has_changed_is_named(names: set[str]) -> None:
    found = differences(GIVEN, "n", shown(**{name: CHANGED[name] for name in names}))
    assert {line.split("=")[0] for line in found} == names


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"time": "90:30"}, {"TimeLimit": "01:31:00"}),
        ({"time": "UNLIMITED"}, {"TimeLimit": "UNLIMITED"}),
        ({"time": "2-12"}, {"TimeLimit": "2-12:00:00"}),
        ({"partition": "a,b"}, {"Partition": "b"}),
        ({"account": "team"}, {"Account": "(null)"}),
        ({"gpus_per_node": 8, "tasks_per_node": 2}, {"TresPerNode": "gres:gpu:8"}),
        ({"gpus_per_node": 8, "tasks_per_node": 2}, {"TresPerNode": "gres/gpu:h100:8"}),
        ({"gpus_per_task": 1, "tasks_per_node": 2}, {"TresPerTask": "cpu=2,gres/gpu=1"}),
        ({"more": ("reservation=week", "exclusive")}, {"Reservation": "week"}),
    ],
    ids=str,
)
def test_the_same_in_slurms_own_words_is_no_difference(options: dict[str, object], changes: dict[str, str]) -> None:
    given_options = SlurmOptions(**{"nodes": 2, "tasks_per_node": 2, **options})  # type: ignore[arg-type]
    assert differences(given_options, "n", shown(**changes)) == []
    other = {name: value.replace("8", "4").replace("b", "c").replace("week", "day") for name, value in changes.items()}
    if other != changes:
        assert len(differences(given_options, "n", shown(**other))) == 1


SCONTROL = """#!/bin/bash
echo "scontrol $*" >> asked
printf '%s\\n' "$SHOWN"
exit ${SHOW_CODE:-0}
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> asked
exit ${CANCEL_CODE:-0}
"""
CONTROLLER = {"scontrol": SCONTROL, "scancel": SCANCEL}


@pytest.mark.fault(
    "input",
    "a job that Slurm makes with other options than `mtrain launch slurm` was given",
    happens="each option that differs is named, and the job is cancelled",
    exit_code=2,
)
@pytest.mark.parametrize("cancel_code", [0, 1])
def test_a_job_with_other_options_is_cancelled(folder: Path, notice: Notice, cancel_code: int) -> None:
    made = shown(JobName="n", Partition="debug", NumTasks="2", Account="(null)", TimeLimit="UNLIMITED")
    arguments = ["run.dir=runs/a", "--nodes=2", "--ntasks-per-node=2", "--name=n", "--partition=gpu"]
    install(folder, CONTROLLER)
    with notice:
        done = launch(folder, *arguments, SHOWN=made, CANCEL_CODE=str(cancel_code))
    assert done.returncode == notice.exit_code
    so = "it is cancelled" if cancel_code == 0 else "cancel it (exit code 1)"
    assert done.stderr == (
        "error: Slurm has changed the job's options: job 4711 has NumTasks=2 instead of 4, Partition=debug instead "
        f"of gpu; {so}; use options that your site's rules allow\n"
    )
    asked = (folder / "asked").read_text().splitlines()
    assert asked == ["scontrol --clusters=cluster show job -o 4711", "scancel --clusters=cluster 4711"]


@pytest.mark.parametrize(
    ("answer", "code"), [("", "0"), ("JobId=47119 Partition=x", "0"), ("cannot contact controller", "1")]
)
def test_a_job_that_cannot_be_read_back_is_said_to_be_submitted(folder: Path, answer: str, code: str) -> None:
    install(folder, CONTROLLER)
    done = launch(folder, "run.dir=runs/a", "--nodes=2", SHOWN=answer, SHOW_CODE=code)
    assert done.returncode == 0
    assert "warning: job 4711 is submitted, but its options could not be read back (" in done.stderr
    assert (folder / "runs" / "a" / "submissions" / "0001" / "job_id").read_text() == "4711\n"


@pytest.mark.parametrize("answer", ["", "Welcome", "sbatch: job 4711 is verified"])
def test_an_answer_without_a_job_number_is_no_job(folder: Path, answer: str) -> None:
    install(folder, {"sbatch": f"#!/bin/bash\necho '{answer}'\n"})
    done = launch(folder, "run.dir=runs/a", "--nodes=2")
    assert (done.returncode, "sbatch printed no job number (" in done.stderr) == (7, True)


def test_defaults_of_a_site_become_options_of_the_script(folder: Path) -> None:
    site = {"SBATCH_PARTITION": "gpu", "SBATCH_ACCOUNT": "team", "SBATCH_TIMELIMIT": "60", "SBATCH_QOS": ""}
    done = launch(folder, "run.dir=runs/a", "--nodes=2", "--time=90", "--dry-run", **site)
    assert {"#SBATCH --partition=gpu", "#SBATCH --account=team", "#SBATCH --time=90"} <= set(done.stdout.splitlines())
    assert [line for line in done.stderr.splitlines() if line.startswith("note: ")] == [
        "note: --account=team comes from the environment variable SBATCH_ACCOUNT",
        "note: --partition=gpu comes from the environment variable SBATCH_PARTITION",
        "note: SBATCH_TIMELIMIT in the environment has no effect on the job; set it with an option "
        "here, or with --sbatch name=value",
    ]
    refused = launch(folder, "run.dir=runs/a", "--nodes=2", "--dry-run", SBATCH_PARTITION="a b")
    assert (refused.returncode, "--partition is 'a b'" in refused.stderr) == (2, True)


@pytest.mark.parametrize("exists", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_run_folder_has_one_name_by_every_path(folder: Path, exists: bool) -> None:
    (folder / "disk" / "runs").mkdir(parents=True)
    if exists:
        (folder / "disk" / "runs" / "a").mkdir()
    (folder / "link").symlink_to(folder / "disk" / "runs")
    (folder / "other").symlink_to("link/a")
    paths = ["disk/runs/a", "disk/runs/a/", "link/a", "other", "./disk/../link/a", f"{folder}/disk//runs/./a"]
    named = [launch(folder, f"run.dir={path}", "--nodes=2", "--dry-run").stdout for path in paths]
    names = {line for text in named for line in text.splitlines() if line.startswith("#SBATCH --job-name=")}
    assert len(names) == 1, names
    assert names.pop().startswith("#SBATCH --job-name=a-")


PLAIN = st.sampled_from(["a", "b", "c d", "ü"])
PLACES = st.lists(PLAIN, min_size=1, max_size=3).map(lambda parts: Path("/nothing.here", *parts))


@given(PLACES, st.lists(PLAIN, max_size=2), st.lists(PLACES, min_size=1, max_size=3, unique=True))
def test_bind_mounts_do_not_change_the_name(source: Path, below: list[str], points: list[Path]) -> None:
    """The folder `source` of the main disk is mounted a second time at each of `points`, as by `mount --bind`."""
    apart = [point for point in points if not source.is_relative_to(point) and not point.is_relative_to(source)]
    binds = [f"{n} 1 8:1 {quoted(source)} {quoted(point)} rw - ext4 /dev/a rw" for n, point in enumerate(apart, 30)]
    mounts = "\n".join(["20 1 8:1 / / rw - ext4 /dev/a rw", "21 20 0:9 / /proc rw - proc proc rw", *binds])
    for n, point in enumerate(apart):
        inner = any(other.is_relative_to(point) for other in apart[n + 1 :] + apart[:n])
        if not inner and not any(point.is_relative_to(other) for other in apart[:n] + apart[n + 1 :]):
            assert main_path(point.joinpath(*below), mounts) == source.joinpath(*below)
    assert main_path(source.joinpath(*below), mounts) == source.joinpath(*below)


def quoted(path: Path) -> str:
    """Quotes a path as the kernel does in mountinfo."""
    return str(path).replace(" ", "\\040")


def test_a_folder_of_another_disk_has_its_own_name() -> None:
    disk = "21 20 8:2 /runs /disk rw - ext4 /dev/b rw\n22 20 8:2 /runs/x /x rw - ext4 b rw"
    mounts = f"20 1 8:1 / / rw - ext4 /dev/a rw\n{disk}"
    assert main_path(Path("/disk/x/y"), mounts) == Path("/disk/x/y") == main_path(Path("/x/y"), mounts)
    assert main_path(Path("/runs/x/y"), mounts) == Path("/runs/x/y")
    assert main_path(Path("/runs/x/y"), "") == Path("/runs/x/y")
