"""`mtrain launch slurm`: what it refuses, what it writes, and that nothing a user gives becomes shell code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.base.errors import ConfigError
from mtrain.launch.slurm.options import SlurmOptions, container_command, runtime_named
from mtrain.launch.slurm.script import TEMPLATE, SlurmJob, render
from mtrain.launch.slurm.submit import prepare, signal_seconds
from tests.fault_table import Notice
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
    """What bash makes of the script's settings: the words of each name, one a line."""
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
    with pytest.raises(ConfigError, match="--name"):
        SlurmOptions(1, name=text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "a\n#SBATCH --wrap=x"}, "--partition"),
        ({"account": "a b"}, "--account"),
        ({"time": "1 day"}, "--time"),
        ({"nodes": 0}, "--nodes"),
        ({"gpus_per_node": 8, "gpus_per_task": 1}, "keep one"),
        ({"mounts": ("/data",)}, "--container"),
        ({"container": "image\nx"}, "control character"),
        ({"more": ("wrap=rm",)}, "set by mtrain"),
        ({"more": ("comment=a b",)}, "without blanks"),
        ({"more": ("--reservation=x",)}, "name=value"),
        ({"env_file": Path("/nonexistent")}, "cannot be read"),
        ({"max_retries": -1}, "--max-retries"),
    ],
    ids=str,
)
def test_what_slurm_would_not_take_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        SlurmOptions(**{"nodes": 1, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "mode", "words"), [("A=1\nB", 0o600, "line 2"), ("A=1", 0o644, "chmod 600")])
def test_an_env_file_that_would_not_work_is_refused(tmp_path: Path, text: str, mode: int, words: str) -> None:
    (path := tmp_path / "env").write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=words):
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
    with pytest.raises(ConfigError, match="at least 45 minutes"):
        signal_seconds(600, 1800)


def test_an_unknown_container_runtime_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be pyxis or apptainer"):
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
    with pytest.raises(ConfigError, match="num_stepz"):
        prepare([folder / "run.yaml"], ["train.num_stepz=5"], SlurmOptions(2))
    with pytest.raises(ConfigError, match="tp"):
        prepare([folder / "run.yaml"], ["run.dir=runs/x", "layout.tp=3"], SlurmOptions(2))
    with pytest.raises(ConfigError, match=r"run\.dir"):
        prepare([folder / "run.yaml"], ['run.dir=runs/"x'], SlurmOptions(2))
    assert not (folder / "runs").exists()


def launch(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "sbatch").write_text(SBATCH)
    (folder / "sbatch").chmod(0o755)
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
        "error: Slurm refuses the job (sbatch: error: invalid partition specified: x); change what it names\n"
    )
    assert not (folder / "runs" / "a" / "submissions" / "0001").exists()


def test_a_dry_run_writes_nothing(folder: Path) -> None:
    shown = launch(folder, "run.dir=runs/a", "--nodes=2", "--dry-run")
    assert shown.stdout.startswith("#!/usr/bin/env bash\n")
    assert "#SBATCH --nodes=2" in shown.stdout
    assert not (folder / "runs").exists()
    assert not (folder / "calls").exists()


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
