"""Nodes that a job would get, from sinfo: their cores and GPUs decide defaults."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from typing import NamedTuple

from mtrain.base.errors import ConfigError
from mtrain.launch.slurm.options import SlurmOptions, for_slurm

_TIMEOUT_S = 15
_GPUS = re.compile(r"\bgpu(?::[^:,()]+)?:(\d+)")
"""GPUs in generic resources: gpu:8, gpu:h100:8(S:0-1)."""


class Nodes(NamedTuple):
    """What every node of a partition has at least."""

    cpus: int
    gpus: int
    """GPUs; 0 if Slurm does not count them."""


def nodes_of(partition: str | None) -> Nodes | None:
    """Asks for the nodes of a partition, or several by commas (None: the default one); None if Slurm does not
    answer."""
    if shutil.which("sinfo") is None:
        return None
    asked = [f"--partition={partition}"] if partition is not None else []
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", *asked, "--format=%P|%c|%G"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=for_slurm(os.environ),
        )
    except subprocess.TimeoutExpired:
        return None
    return _smallest(done.stdout, partition is None) if done.returncode == 0 else None


def _smallest(shown: str, of_default: bool) -> Nodes | None:
    """Returns the least that the nodes in sinfo's answer have; a star marks the default partition."""
    rows = [line.strip().split("|", 2) for line in shown.splitlines()]
    rows = [row for row in rows if len(row) == 3 and (row[0].endswith("*") or not of_default)]
    cpus = [int(found[0]) for row in rows if (found := re.match(r"\d+", row[1]))]
    gpus = [sum(map(int, _GPUS.findall(row[2]))) for row in rows]
    return Nodes(min(cpus), min(gpus)) if rows and len(cpus) == len(rows) else None


def completed_by(options: SlurmOptions, nodes: Nodes | None, device: str) -> tuple[SlurmOptions, list[str]]:
    """Completes the options by what the nodes have; returns them with a note for each default.

    Slurm itself gives a rank one core. Here each gets its share of the cores of a GPU or of the node.
    """
    if nodes is None:
        return options, []
    asked_gpus = options.gpus_per_node
    if asked_gpus is None:
        asked_gpus = (options.gpus_per_task or 0) * options.ranks_per_node
    if nodes.gpus and not asked_gpus and device != "cpu":
        raise ConfigError(
            f"the nodes have {nodes.gpus} GPUs each, and neither --gpus-per-node nor --gpus-per-task is given; add "
            f"--gpus-per-node {nodes.gpus}, or train.device=cpu for a run without"
        )
    share = min(1.0, asked_gpus / nodes.gpus) if nodes.gpus and asked_gpus else 1.0
    cpus = int(nodes.cpus * share) // options.ranks_per_node
    if options.cpus_per_task is not None or cpus < 1:
        return options, []
    note = f"note: --cpus-per-task={cpus} follows from the {nodes.cpus} cores of a node; give the option for another"
    return replace(options, cpus_per_task=cpus), [note]
