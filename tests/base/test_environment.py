"""Rank of a process by the variables of each launcher."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from mtrain.base.environment import RankEnvironment, cores_of_rank, git_checkout, program_versions
from mtrain.base.errors import MachineError
from tests.messages import refuses

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}


def test_without_a_launcher_a_process_is_alone() -> None:
    assert RankEnvironment.from_environ({}) == RankEnvironment(0, 1, 0, 1, "127.0.0.1", 0)


def test_torchrun_is_read() -> None:
    assert RankEnvironment.from_environ(TORCHRUN) == RankEnvironment(5, 8, 1, 4, "host", 1234)


def test_torchrun_goes_before_slurm() -> None:
    assert RankEnvironment.from_environ(SRUN | TORCHRUN).master_addr == "host"


@pytest.mark.parametrize(
    ("environ", "cores"),
    [
        ({}, 16),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "1"}, 16),  # as launchers set it unasked
        (TORCHRUN, 4),
        (TORCHRUN | {"OMP_NUM_THREADS": "3"}, 3),
        (TORCHRUN | {"OMP_NUM_THREADS": "8"}, 4),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "32"}, 1),
        (SRUN, 4),
        (SRUN | {"SLURM_CPUS_PER_TASK": "6"}, 6),
        (SRUN | {"SLURM_CPUS_PER_TASK": "64"}, 16),
        (SRUN | TORCHRUN | {"SLURM_CPUS_PER_TASK": "12"}, 3),  # of the task that started torchrun
    ],
)
def test_ranks_of_a_machine_share_its_cores(environ: dict[str, str], cores: int) -> None:
    assert cores_of_rank(environ, allowed=16) == cores


def test_a_rank_takes_no_core_that_it_may_not_run_on() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cores_of_rank({}) == 1
    finally:
        os.sched_setaffinity(0, before)
    assert cores_of_rank({}) == len(before)


def test_srun_is_read() -> None:
    assert RankEnvironment.from_environ(SRUN) == RankEnvironment(5, 8, 1, 4, "node07", 24567)


def test_a_step_smaller_than_its_job_counts_its_own_tasks() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_STEP_NODELIST": "node08,node09"}
    found = RankEnvironment.from_environ(SRUN | step)
    assert (found.world_size, found.local_world_size, found.master_addr) == (6, 2, "node08")


def test_under_srun_the_address_can_be_given() -> None:
    found = RankEnvironment.from_environ(SRUN | {"MASTER_ADDR": "other", "MASTER_PORT": "99"})
    assert (found.master_addr, found.master_port) == ("other", 99)


def test_two_steps_of_a_job_have_two_ports() -> None:
    """The steps of the jobs with the next numbers, which may run on the same node, have other ports, too."""
    jobs = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(7, 17) for step in range(10)]
    ports = [RankEnvironment.from_environ(SRUN | job).master_port for job in jobs]
    assert len(set(ports)) == len(jobs)
    assert all(20000 <= port < 30000 for port in ports)
    assert ports[0] == 20007, "that of launch/slurm.sbatch"
    assert RankEnvironment.from_environ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}).master_port == 24567


def test_the_script_of_sbatch_is_alone() -> None:
    batch = {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"}
    batch |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"}
    assert RankEnvironment.from_environ(batch).world_size == 1
    assert RankEnvironment.from_environ(batch | {"SLURM_STEP_ID": "0"}).world_size == 8


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node[003-005,9]-ib,m1", "node003-ib"),
        ("a,b[1-2]", "a"),
        ("rack[1,3]n[04-05]", "rack1n04"),
        ("gpu-a-[12,14]", "gpu-a-12"),
    ],
)
def test_the_first_node_holds_rank_0(nodes: str, first: str) -> None:
    assert RankEnvironment.from_environ(SRUN | {"SLURM_JOB_NODELIST": nodes}).master_addr == first


def test_without_a_node_list_the_launching_node_is_taken() -> None:
    given = {key: value for key, value in SRUN.items() if "NODELIST" not in key}
    assert RankEnvironment.from_environ(given).master_addr == "10.0.0.9"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name: str) -> None:
    with refuses(MachineError, name):
        RankEnvironment.from_environ({key: value for key, value in TORCHRUN.items() if key != name})


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"RANK": "8"}, "rank 8"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"LOCAL_RANK": "4"}, "local rank 4"),
        ({"MASTER_PORT": ""}, "MASTER_PORT"),
    ],
)
def test_contradictions_are_named(change: dict[str, str], fact: str) -> None:
    with refuses(MachineError, fact):
        RankEnvironment.from_environ(TORCHRUN | change)


@pytest.mark.parametrize("change", [{"SLURM_TASKS_PER_NODE": "x"}, {"SLURM_NODEID": "2"}])
def test_contradictions_of_slurm_are_named(change: dict[str, str]) -> None:
    with refuses(MachineError, "SLURM_TASKS_PER_NODE"):
        RankEnvironment.from_environ(SRUN | change)


def test_versions_are_those_that_would_be_imported() -> None:
    versions = program_versions()
    assert versions["torch"] == torch.__version__
    assert versions["numpy"] == numpy.__version__
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions.keys() >= {"mtrain", "megatron-core"}


def test_a_missing_package_is_left_out_of_the_versions() -> None:
    program = "from mtrain.base.environment import program_versions; print(*program_versions())"
    without_packages = [sys.executable, "-S", "-c", program]
    done = subprocess.run(without_packages, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["mtrain", "python"]


def test_the_git_state_of_the_source_is_reported(tmp_path: Path) -> None:
    source = tmp_path / "program.py"
    source.write_text("1")
    assert git_checkout(source) is None
    name = ["-c", "user.name=n", "-c", "user.email=e"]
    for arguments in (["init", "-q"], ["add", "program.py"], [*name, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    clean = git_checkout(source)
    assert clean is not None
    assert len(clean.commit) == 40
    assert not clean.dirty
    (tmp_path / "untracked").write_text("")
    assert git_checkout(source) == clean
    source.write_text("2")
    assert git_checkout(source) == clean._replace(dirty=True)
    assert git_checkout(tmp_path / "untracked") is None
