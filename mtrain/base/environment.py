"""Environment of this process: its rank (under torchrun, srun or alone), cores and software versions."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mtrain.base.errors import MachineError
from mtrain.base.ground import found_megatron, found_torch
from mtrain.base.spelling import counted
from mtrain.base.version import __version__

PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy")
"""Distributions whose versions can change the numbers of a run."""
_GIT_TIMEOUT_S = 10
_FIRST_PORT, _NUM_PORTS = 20000, 10000
_BETWEEN_STEPS = 3571
"""Stride between the ports of a job's steps; coprime to the number of ports, so neighbouring steps and jobs differ."""


def program_versions() -> dict[str, str]:
    """Returns the versions of mtrain, Python and the installed PACKAGES, without importing them."""
    return dict(_versions())


@cache
def _versions() -> Mapping[str, str]:
    import importlib.metadata  # here, because it imports the e-mail parser

    versions = {"mtrain": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        for distribution in importlib.metadata.distributions(name=name):
            versions[name] = distribution.version
            break
    for name, package in (("torch", found_torch()), ("megatron-core", found_megatron())):
        # the imported package may not be the installed one, and metadata of PyPI's torch omit its CUDA version
        if package is not None and package.version is not None:
            versions[name] = package.version
    return versions


def with_package(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which a new interpreter finds this package."""
    package = str(Path(__file__).parents[2])
    return {**environ, "PYTHONPATH": os.pathsep.join([package, *filter(None, [environ.get("PYTHONPATH")])])}


class GitCheckout(NamedTuple):
    commit: str
    dirty: bool
    """Whether tracked files differ from the commit."""


def git_checkout(source: Path = Path(__file__)) -> GitCheckout | None:
    """Returns the commit of this program's source; None if git does not track it, such as in an installed package."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source.parent), *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=_GIT_TIMEOUT_S).stdout

    try:
        git("ls-files", "--error-unmatch", source.name)
        return GitCheckout(git("rev-parse", "HEAD").strip(), bool(git("status", "--porcelain", "-uno").strip()))
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True)
class RankEnvironment:
    """Rank, world size and rendezvous address, from the launcher."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    """Port of the rendezvous; 0 for a single rank without a launcher, which may use any free port."""

    def __post_init__(self) -> None:
        """Refuses numbers that contradict each other.

        Raises:
            MachineError: A rank is not below its world size.
        """
        if not 0 <= self.rank < self.world_size or not 0 <= self.local_rank < self.local_world_size:
            raise MachineError(
                f"the launcher says rank {self.rank} of {self.world_size} and local rank {self.local_rank} of "
                f"{self.local_world_size}, but a rank must be below its world size; fix the environment variables"
            )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> RankEnvironment:
        """Reads the variables of torchrun or an srun step; without either, returns a single rank.

        Raises:
            MachineError: A variable is missing or not a number.
        """
        if "RANK" in environ or "WORLD_SIZE" in environ:
            return _from_torchrun(environ)
        if "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ and not _is_batch_script(environ):
            return _from_srun(environ)
        return cls(rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", master_port=0)


def cores_of_rank(environ: Mapping[str, str], allowed: int | None = None) -> int:
    """Returns the number of cores that a rank may keep busy during start-up.

    A task of srun has SLURM_CPUS_PER_TASK cores to itself; otherwise the ranks of a machine share the available cores.
    OMP_NUM_THREADS is an upper bound if it is above 1; launchers set 1 on any machine, so 1 is ignored.

    Args:
        allowed: Number of cores available to the process; None asks the operating system.

    Raises:
        MachineError: A launcher's variable is missing, not a number, or contradicts another.
    """
    cores = len(os.sched_getaffinity(0)) if allowed is None else allowed
    task_cores, threads = (environ.get(name, "") for name in ("SLURM_CPUS_PER_TASK", "OMP_NUM_THREADS"))
    if task_cores.isdecimal():
        cores = min(cores, int(task_cores))
    has_own_cores = task_cores.isdecimal() and "RANK" not in environ and "WORLD_SIZE" not in environ
    if not has_own_cores:  # under torchrun the task is the launcher, and all its ranks share its cores
        cores //= RankEnvironment.from_environ(environ).local_world_size
    if threads.isdecimal() and int(threads) > 1:
        cores = min(cores, int(threads))
    return max(1, cores)


def _from_torchrun(environ: Mapping[str, str]) -> RankEnvironment:
    world_size = _number(environ, "WORLD_SIZE")
    return RankEnvironment(
        rank=_number(environ, "RANK"),
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK"),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else world_size,
        master_addr=_text(environ, "MASTER_ADDR"),
        master_port=_number(environ, "MASTER_PORT"),
    )


def _from_srun(environ: Mapping[str, str]) -> RankEnvironment:
    """Reads srun's variables; MASTER_ADDR and MASTER_PORT take precedence, and each step of a job gets its own port."""
    return RankEnvironment(
        rank=_number(environ, "SLURM_PROCID"),
        world_size=_number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world_size=_tasks_on_this_node(environ),
        master_addr=environ["MASTER_ADDR"] if "MASTER_ADDR" in environ else _first_node(environ),
        master_port=_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else _port_of_step(environ),
    )


def _port_of_step(environ: Mapping[str, str]) -> int:
    step = _number(environ, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environ else 0
    return _FIRST_PORT + (_number(environ, "SLURM_JOB_ID") + _BETWEEN_STEPS * step) % _NUM_PORTS


def _is_batch_script(environ: Mapping[str, str]) -> bool:
    """Says whether this process is an sbatch script: a single process, although it sees the job's task count."""
    return environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ


def _tasks_on_this_node(environ: Mapping[str, str]) -> int:
    """Reads this node's number of tasks from Slurm's list: `2(x3),1` means 2, 2, 2, 1."""
    name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environ else "SLURM_TASKS_PER_NODE"
    if name not in environ:
        return _number(environ, "SLURM_NTASKS")
    counts: list[int] = []
    for item in environ[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise MachineError(f"{name}={environ[name]!r} needs the form 2(x3),1; fix the variable")
        counts += [int(match[1])] * int("1" if match[2] is None else match[2])
    node = _number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    if node >= len(counts):
        raise MachineError(
            f"SLURM_NODEID={node}, but {name}={environ[name]!r} names {counted(len(counts), 'node')}; fix the variables"
        )
    return counts[node]


def _first_node(environ: Mapping[str, str]) -> str:
    """Returns the first node of Slurm's list (`n[003-005,9]-ib,m1` -> `n003-ib`), else the node that called srun."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", environ[name])
            return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else environ[name])
    return _text(environ, "SLURM_LAUNCH_NODE_IPADDR")


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not text.isdecimal():
        raise MachineError(f"{name}={text!r} must be a whole number; fix the environment variable")
    return int(text)


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise MachineError(
            f"the environment variable {name} is not set, but a launcher's other variables are; start the ranks with "
            "torchrun, srun or `mtrain launch local`, or unset RANK and WORLD_SIZE to run alone"
        )
    return environ[name]
