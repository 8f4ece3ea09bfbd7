"""Where the ranks of a node and their watchdog meet: a folder in memory that belongs to one launch on one node."""

from __future__ import annotations

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
    """The same for all ranks of one launch on one node, and for no other; not made here.

    Args:
        environ: What the launcher has set.
    """
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
    """Where the rank writes its pulse."""
    return folder / f"rank_{rank:05d}"


def stack_file(folder: Path, rank: int) -> Path:
    """Where the rank's own handler writes its stacks."""
    return folder / f"stack_{rank:05d}"


def has_launcher(environment: RankEnvironment) -> bool:
    """Whether there is one, so that nobody sits at this very process with a debugger."""
    return environment.master_port != 0
