"""Starts of a run: each has an increasing number, and a small file with its account.

The number tells an older start from a newer one without locks (`mtrain.runs.lock`). The file is the source of the run's
goodput (`mtrain.runs.goodput`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mtrain.base.files import disk_faults

_NUM_BYTES = 4096
"""Size of every file from the first write on, so that a later one needs no more disk space."""
_NAME = re.compile(r"(\d{5,})\.json")


@dataclass(frozen=True)
class RunStart:
    """Account of a start, as rank 0 last wrote it."""

    number: int
    """Counted from 1."""
    began_s: float
    """Unix time at which rank 0's process began."""
    written_s: float
    """Unix time of this account, until which the start is known to have run."""
    host: str
    job: str | None
    """Number of the Slurm job and its restart; None without Slurm."""
    world_size: int
    start_step: int | None = None
    """Updates at the beginning, or the fewest that it went back to; None before that is known."""
    step: int = 0
    """Updates completed."""
    trained_s: float = 0.0
    """Seconds in the completed steps of this start."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds in each phase (`mtrain.base.heartbeat.Phase`), including the current one."""
    saves: tuple[tuple[int, float], ...] = ()
    """Step of each of the last saves, and `trained_s` when that step was completed."""
    lost_steps: int = 0
    """Updates of this start that were rolled back."""
    lost_s: float = 0.0
    """Seconds in the lost updates; not in `trained_s`."""
    ended: str | None = None
    """How it ended: `done`, or an error's class; None if it runs or was killed."""

    @property
    def start_up_s(self) -> float:
        """Returns the seconds until its first step: programs load, ranks meet, model, data and checkpoint are read."""
        return self.phases_s.get("start", 0.0) + self.phases_s.get("build", 0.0)

    @property
    def step_s(self) -> float | None:
        """Returns the mean seconds of a step; None without one."""
        steps = 0 if self.start_step is None else self.step - self.start_step
        return self.trained_s / steps if steps > 0 else None


def start_file(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.json"


def new_number(folder: Path) -> int:
    """Reserves the next number, which no other start gets."""
    with disk_faults(f"write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        number = max(_numbers(folder), default=0) + 1
        while True:
            try:
                os.close(
                    os.open(start_file(folder, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                )
            except FileExistsError:
                number += 1
            else:
                return number


def write_start(folder: Path, start: RunStart) -> None:
    """Overwrites the start's account without waiting for the disk; raises OSError if it refuses."""
    text = json.dumps(asdict(start))
    file = os.open(start_file(folder, start.number), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(file, text.ljust(_NUM_BYTES - 1).encode() + b"\n", 0)
    finally:
        os.close(file)


def read_starts(folder: Path) -> list[RunStart]:
    """Reads all accounts in the order of the starts; skips damaged ones, and those being written."""
    try:
        found = (_read(start_file(folder, number)) for number in sorted(_numbers(folder)))
        return [start for start in found if start is not None]
    except OSError:
        return []


def _numbers(folder: Path) -> list[int]:
    return [int(match[1]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]


def _read(path: Path) -> RunStart | None:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        saves = tuple((int(step), float(seconds)) for step, seconds in content.pop("saves", ()))
        return RunStart(**content, saves=saves)
    except (OSError, ValueError, TypeError):
        return None
