"""The batch script: launch/slurm.sbatch with its settings filled in; the part after them is the same in every job."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mtrain.base.version import PACKAGE_FOLDER
from mtrain.launch.slurm.options import SlurmOptions, container_command

TEMPLATE = PACKAGE_FOLDER / "_share" / "launch" / "slurm.sbatch"
_BODY = "# --- from here on the same in every job ---\n"
_NAME_LENGTH = 48


@dataclass(frozen=True)
class SlurmJob:
    """The run that a script starts."""

    options: SlurmOptions
    run_dir: Path
    """Absolute path."""
    work_dir: Path
    """Absolute path of the folder in which relative paths of the configuration start."""
    config: Sequence[str]
    """Files and overrides for the verb."""
    python: str
    """Python of this environment."""
    signal_s: int
    """Seconds before the time limit at which Slurm asks the job to stop."""
    verb: Sequence[str] = ("train",)
    """Verb of mtrain that the ranks run, with its options."""

    @property
    def name(self) -> str:
        """Returns the job's name, the same for a run folder by any path: such jobs run one after the other."""
        if self.options.name is not None:
            return self.options.name
        folder = main_path(self.run_dir)
        # two run folders of the same name must not wait for each other
        code = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
        return f"{re.sub('[^A-Za-z0-9._-]', '_', folder.name)[:_NAME_LENGTH]}-{code}"


def render(job: SlurmJob) -> str:
    _, body = TEMPLATE.read_text().split(_BODY)
    in_container, command = container_command(job.options, job.python, job.work_dir)
    log = str(job.run_dir / "logs" / "job-%j.log").replace(str(job.run_dir), str(job.run_dir).replace("%", "%%"))
    directives = [
        f"--job-name={job.name}",
        "--dependency=singleton",  # by name: one job at a time for each run folder
        f'--output="{log}"',
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{job.signal_s}",
        "--export=NONE",  # the ranks should not depend on the environment of the submitting user
        *job.options.directives(),
    ]
    env_file = "" if job.options.env_file is None else shlex.quote(str(job.options.env_file.absolute()))
    settings = [
        f"cd {shlex.quote(str(job.work_dir))} || exit 7",
        f"run_dir={shlex.quote(str(job.run_dir))}",
        f"config={_array(job.config)}",
        f"command={_array(command)}",
        f"verb={_array(job.verb)}",
        f"srun_options={_array([*_ranks(job.options), *in_container])}",
        f"env_file={env_file}",
        f"max_retries={job.options.max_retries}",
        f"certify={'yes' if job.options.certifies else ''}",
    ]
    head = ["#!/usr/bin/env bash", "# Written by `mtrain launch slurm`; may be submitted again with sbatch."]
    lines = [*head, *(f"#SBATCH {directive}" for directive in directives), "", "# What this job runs.", *settings, ""]
    return "\n".join(lines) + _BODY + body


def _array(words: Sequence[str]) -> str:
    return f"({shlex.join(words)})"


def _ranks(options: SlurmOptions) -> list[str]:
    """Returns the numbers for srun, which would otherwise take them from variables that a profile can set."""
    counts = {"nodes": options.nodes, "ntasks": options.num_ranks, "ntasks-per-node": options.ranks_per_node}
    return [f"--{name}={count}" for name, count in counts.items()]


_MOUNTS = Path("/proc/self/mountinfo")


class _Mount(NamedTuple):
    device: str
    """Device number of the file system."""
    root: Path
    """Mounted folder of the file system; not / for a bind mount."""
    point: Path
    """Mount point."""


def main_path(folder: Path, mounts: str | None = None) -> Path:
    """Returns the folder's path without links, by the mount that shows most of its file system; `mounts` replaces the
    text of /proc/self/mountinfo."""
    path = folder.resolve()
    if mounts is None:
        with suppress(OSError):
            mounts = _MOUNTS.read_text(errors="surrogateescape")
    known = [_mount(line) for line in (mounts or "").splitlines()]
    over = [mount for mount in known if path.is_relative_to(mount.point)]
    if not over:
        return path
    longest = max(len(mount.point.parts) for mount in over)
    own = [mount for mount in over if len(mount.point.parts) == longest][-1]  # a later mount hides an earlier one
    inside = own.root / path.relative_to(own.point)
    same = [mount for mount in known if mount.device == own.device and inside.is_relative_to(mount.root)]
    main = min(same, key=lambda mount: len(mount.root.parts))  # the first of those that show as much
    return main.point / inside.relative_to(main.root)


def _mount(line: str) -> _Mount:
    fields = [re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), field) for field in line.split(" ")]
    return _Mount(fields[2], Path(fields[3]), Path(fields[4]))
