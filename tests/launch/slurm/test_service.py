"""`mtrain launch slurm --serve`: what it submits, what it waits for, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain.base.errors import ConfigError, MachineError
from mtrain.launch.slurm import service
from mtrain.serve.checked import make_token, read_token
from tests.fault_table import Notice
from tests.launch.slurm.test_submit import folder, install, launch, settings
from tests.messages import check_message, refuses

__all__ = ["folder"]
SBATCH = """#!/bin/bash
echo "4711"
echo '{"address": "http://n1:8123", "slurm_job": "'${JOB_OF_FILE:-4711}'"}' > runs/a/service.json
"""
SCONTROL = """#!/bin/bash
echo "JobId=$5 JobName=x JobState=FAILED Reason=NonZeroExitCode"
"""
WAITS_FIRST = """#!/bin/bash
echo asked >> asked
(($(wc -l < asked) > 1)) && echo "JobId=$5 JobState=FAILED Reason=NonZeroExitCode" && exit
echo "JobId=$5 JobState=PENDING Reason=ReqNodeNotAvail,_UnavailableNodes:n1"
"""
SERVE = ("run.dir=runs/a", "--nodes=2", "--serve")


def test_a_service_is_submitted_and_its_address_printed(folder: Path) -> None:
    install(folder, {"sbatch": SBATCH})
    done = launch(folder, *SERVE, "--port=8123", "layout.tp=2")
    assert done.returncode == 0, done.stderr
    key = folder / "runs" / "a" / "service.key"
    assert "http://n1:8123" in done.stdout
    assert "ssh -N -L 8123:n1:8123" in done.stdout
    assert "TINKER_BASE_URL=http://127.0.0.1:8123" in done.stdout
    assert "runs/a/service.key" in done.stdout
    assert key.stat().st_mode & 0o777 == 0o600
    first = read_token(key)
    assert first.startswith("tml-")
    assert first not in done.stdout + done.stderr
    script = (folder / "runs" / "a" / "submissions" / "0001" / "job.sbatch").read_text()
    given = ["serve", "--host", "0.0.0.0", "--port", "8123", "--token-file", str(key)]
    assert settings(script, folder, "verb") == given
    assert launch(folder, *SERVE).returncode == 0
    assert read_token(key) == first, "clients know it"


def test_a_dry_run_of_a_service_writes_nothing(folder: Path) -> None:
    shown = launch(folder, *SERVE, "--dry-run")
    assert "verb=(serve --host 0.0.0.0 --port 8000 --token-file" in shown.stdout
    assert not (folder / "runs").exists()
    assert "verb=(train)" in launch(folder, "run.dir=runs/a", "--nodes=2", "--dry-run").stdout


@pytest.mark.fault(
    "signals",
    "a service whose job ends before it listens, given to `mtrain launch slurm --serve`",
    happens="the wait ends with the job's state and its first error; an earlier job's address is not taken for its own",
    exit_code=7,
)
@pytest.mark.waits  # as often as the controller may be asked
def test_a_job_that_ends_before_it_listens_is_named(folder: Path, notice: Notice) -> None:
    install(folder, {"sbatch": SBATCH, "scontrol": SCONTROL})
    (folder / "runs" / "a" / "logs").mkdir(parents=True)
    (folder / "runs" / "a" / "logs" / "job-4711.log").write_text("error: cannot listen at 0.0.0.0 port 8000\n")
    with notice:
        done = launch(folder, *SERVE, JOB_OF_FILE="4710")
    assert done.returncode == notice.exit_code
    check_message(done.stderr.splitlines()[-1], "job 4711 has ended (FAILED)", "cannot listen at 0.0.0.0 port 8000")


def test_a_job_that_may_never_start_is_said_while_it_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(folder, {"scontrol": WAITS_FIRST})
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(service, "_POLL_S", 0.0)
    told: list[str] = []
    with refuses(MachineError, "job 4711 has ended (FAILED)"):
        service.wait_for_service(folder / "runs" / "a", "4711", told.append)
    check_message("\n".join(told), "job 4711 waits for ReqNodeNotAvail,_UnavailableNodes:n1", "scancel 4711")


def test_what_cannot_be_served_is_refused_before_the_queue(folder: Path) -> None:
    (folder / "key").write_text("short")
    (folder / "key").chmod(0o600)
    for given, fact in (
        (["run.dir=runs/a", "--nodes=2", "--port=8000"], "--serve"),
        ([*SERVE, "model.mtp_depths=1"], "model.mtp_depths"),
        ([*SERVE, "--token-file=key"], "tml-"),
        ([*SERVE, "model.hf=nowhere"], "nowhere"),
    ):
        done = launch(folder, *given)
        assert done.returncode in (2, 3), done.stderr
        check_message(done.stderr, fact)
    assert not (folder / "runs").exists()


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "key").write_text("tml-0123456789abcdef")
    path.chmod(0o644)
    with refuses(ConfigError, "chmod 600"):
        make_token(path)
