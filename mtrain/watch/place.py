"""Where a node's ranks and their watchdog meet: a folder in memory that belongs to one launch on one node."""

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mtrain.base.environment import RankEnvironment

_MEMORY = Path("/dev/shm")
_OF_LOCAL_LAUNCH = ("MTRAIN_LAUNCH",)
_OF_TORCHRUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_OF_SRUN = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_NODEID")


def node_folder(environ: Mapping[str, str]) -> Path:
    """Returns the folder shared by the ranks of one launch on one node, and by no others; does not create it."""
    if environ.get("MTRAIN_LAUNCH"):
        names: tuple[str, ...] = _OF_LOCAL_LAUNCH
    elif "RANK" in environ:
        names = _OF_TORCHRUN
    else:
        names = _OF_SRUN
    values = [environ.get(name, "") for name in names]
    if not any(values):
        values = [str(os.getpid())]  # alone
    code = hashlib.sha256("\0".join(values).encode()).hexdigest()[:16]
    base = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"mtrain-{os.getuid()}-{code}"


def pulse_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}"


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack_{rank:05d}"


def has_launcher(environment: RankEnvironment) -> bool:
    """Says whether a launcher started this process, so that nobody is debugging it at a terminal."""
    return environment.master_port != 0
