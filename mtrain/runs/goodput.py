"""Starts of a run, each with an increasing number and a small file with its account, and the goodput over all starts.

The number distinguishes an older start from a newer one without locks (`mtrain.runs.lock`). Goodput is the share of a
run's wall time that it spent in steps that it kept, over all its starts. No torch is needed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from mtrain.base.files import disk_faults
from mtrain.base.heartbeat import Heartbeat, current_pulse

_NUM_BYTES = 4096
"""Size of every file from its first write, so that later writes need no more disk space."""
_NAME = re.compile(r"(\d{5,})\.json")


@dataclass(frozen=True)
class RunStart:
    """Account of a start, which rank 0 writes."""

    number: int
    """Number of the start, counted from 1."""
    began_s: float
    """Unix time at which rank 0's process began."""
    written_s: float
    """Unix time of this account; the start ran at least until then."""
    host: str
    job: str | None
    """Number of the Slurm job and its restart; None without Slurm."""
    world_size: int
    start_step: int | None = None
    """Number of updates at the beginning, or the lowest after a rollback; None before that is known."""
    step: int = 0
    trained_s: float = 0.0
    """Seconds spent in completed steps of this start."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Phase (`mtrain.base.heartbeat.Phase`) -> seconds spent in it, including the current phase."""
    saves: tuple[tuple[int, float], ...] = ()
    """Step of each of the last saves, with `trained_s` at the end of that step."""
    lost_steps: int = 0
    """Number of this start's updates that were rolled back."""
    lost_s: float = 0.0
    """Seconds spent in rolled-back updates; not part of `trained_s`."""
    ended: str | None = None
    """End of the start: `done`, or an error's class; None if it runs or was killed."""

    @property
    def start_up_s(self) -> float:
        """Seconds until the first step: loading programs, meeting other ranks, reading model, data and checkpoint."""
        return self.phases_s.get("start", 0.0) + self.phases_s.get("build", 0.0)

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step; None without a step."""
        steps = 0 if self.start_step is None else self.step - self.start_step
        return self.trained_s / steps if steps > 0 else None


def start_file(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.json"


def new_number(folder: Path) -> int:
    """Reserves and returns the next number, which no other start gets."""
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
    """Overwrites the start's account without waiting for the disk; raises OSError if that fails."""
    text = json.dumps(asdict(start))
    file = os.open(start_file(folder, start.number), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(file, text.ljust(_NUM_BYTES - 1).encode() + b"\n", 0)
    finally:
        os.close(file)


def read_starts(folder: Path) -> list[RunStart]:
    """Reads all accounts in the order of the starts; skips damaged ones and ones that are being written."""
    try:
        accounts = (_read(start_file(folder, number)) for number in sorted(_numbers(folder)))
        return [start for start in accounts if start is not None]
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


@dataclass(frozen=True)
class Goodput:
    """Use of a run's wall time, in seconds; steps are optimizer updates."""

    effective_s: float
    """Time in steps that the run kept."""
    wall_s: float
    """Time from the first start to the last account of the last start."""
    waiting_s: float
    """Time between starts: in the queue, or until a restart."""
    start_up_s: float
    """Time from each start to its first step: loading programs, meeting ranks, reading model, data and checkpoint."""
    saving_s: float
    """Time in which training waited for saves."""
    validation_s: float
    export_s: float
    """Time of the export after the last step."""
    lost_s: float
    """Time in steps that were lost, because no checkpoint contained them."""
    other_s: float
    """Remaining time, such as for records and polls."""
    lost_steps: int
    """Number of updates that were lost by a restart or a rollback."""
    num_starts: int

    @property
    def restarts(self) -> int:
        """Number of starts after the first."""
        return self.num_starts - 1

    @property
    def fraction(self) -> float:
        return self.effective_s / self.wall_s if self.wall_s > 0 else 0.0

    def lines(self) -> list[str]:
        parts = {
            "start-up": self.start_up_s,
            "saving": self.saving_s,
            "validation": self.validation_s,
            "export": self.export_s,
            "lost steps": self.lost_s,
            "between starts": self.waiting_s,
            "other": self.other_s,
        }
        details = ", ".join(f"{name} {_readable(seconds)}" for name, seconds in parts.items() if seconds >= 0.05)
        return [
            f"goodput {self.fraction:.1%}: {_readable(self.effective_s)} in steps that count, of "
            f"{_readable(self.wall_s)}" + (f" ({details})" if details else ""),
            f"restarts {self.restarts}, lost steps {self.lost_steps}",
        ]


def goodput_of(starts: Sequence[RunStart]) -> Goodput | None:
    """Computes the goodput over the starts of one run; None without starts."""
    if not starts:
        return None
    lost_steps, lost_s = _lost_steps(starts)
    trained_s = math.fsum(start.trained_s for start in starts)
    waiting_s = math.fsum(max(0.0, later.began_s - earlier.written_s) for earlier, later in pairwise(starts))
    lived_s = math.fsum(max(0.0, start.written_s - start.began_s) for start in starts)
    phases = {
        name: math.fsum(start.phases_s.get(name, 0.0) for start in starts)
        for name in ("start", "build", "save", "validation", "export")
    }
    rolled_back_s = math.fsum(start.lost_s for start in starts)
    known_s = trained_s + rolled_back_s + math.fsum(phases.values())
    return Goodput(
        effective_s=trained_s - lost_s,
        wall_s=lived_s + waiting_s,
        waiting_s=waiting_s,
        start_up_s=phases["start"] + phases["build"],
        saving_s=phases["save"],
        validation_s=phases["validation"],
        export_s=phases["export"],
        lost_s=lost_s + rolled_back_s,
        other_s=max(0.0, lived_s - known_s),
        lost_steps=lost_steps + sum(start.lost_steps for start in starts),
        num_starts=len(starts),
    )


def goodput_of_run(run_dir: Path) -> Goodput | None:
    """Computes the goodput of a run folder; None without starts."""
    return goodput_of(read_starts(run_dir / "starts"))


def _lost_steps(starts: Sequence[RunStart]) -> tuple[int, float]:
    """Counts the steps that a later start repeated, and their seconds."""
    steps, seconds = 0, 0.0
    for number, start in enumerate(starts):
        begin = start.start_step
        if begin is None or start.step <= begin:
            continue
        # updates beyond the lowest step at which a later start resumed are lost
        resumed = min(
            (later.start_step for later in starts[number + 1 :] if later.start_step is not None), default=None
        )
        if resumed is None or resumed >= start.step:
            continue
        last_kept = max(resumed, begin)
        steps += start.step - last_kept
        # the time recorded at that save, otherwise an estimate in proportion
        in_proportion = start.trained_s * (last_kept - begin) / (start.step - begin)
        seconds += start.trained_s - dict(start.saves).get(last_kept, in_proportion)
    return steps, seconds


def _readable(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 120 else f"{minutes} min"


_log = logging.getLogger(__name__)

_NUM_SAVES = 8
_NUM_STEPS = 1000
"""Number of steps whose times are stored; for a save that takes longer to reach the disk, lost time is estimated."""


class StartAccount:
    """Account of the current start, which rank 0 updates inside `with`; at its end rank 0 prints the goodput."""

    def __init__(self, folder: Path, number: int, rank: int, world_size: int) -> None:
        self._folder, self._is_writer = folder, rank == 0
        job, now_s, pulse = os.environ.get("SLURM_JOB_ID"), time.time(), current_pulse()
        # always replaced as a whole, since the heartbeat's thread reads it while training continues
        self._start = RunStart(
            number=number,
            # the current time in a user's program, whose beginning is not known
            began_s=now_s - (0.0 if pulse is None else time.monotonic() - pulse.opened_s),
            written_s=now_s,
            host=socket.gethostname(),
            job=None if job is None else f"{job}-{os.environ.get('SLURM_RESTART_COUNT', '0')}",
            world_size=world_size,
        )
        self._heartbeat: Heartbeat | None = None
        self._at: dict[int, float] = {}

    def __enter__(self) -> StartAccount:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._start = replace(self._start, ended="done" if kind is None else kind.__name__)
        if not self._is_writer:
            return
        try:
            self.write()
            goodput = goodput_of(read_starts(self._folder))
        except OSError:
            return  # such as a full disk; the account of some seconds ago still exists
        if goodput is not None and self._start.step and kind is None:
            for line in goodput.lines():
                _log.info(line)

    def follow(self, heartbeat: Heartbeat) -> None:
        """Writes the account at every beat, with the heartbeat's time in each phase."""
        self._heartbeat = heartbeat
        heartbeat.on_beat.append(self.write)

    def goes_on(self, step: int) -> None:
        """Sets the number of updates at the beginning of this start."""
        self._start = replace(self._start, start_step=step, step=step)

    def completed(self, step: int, seconds: float) -> None:
        """Records that update number `step` is complete and took `seconds`."""
        self._at[step] = self._start.trained_s + seconds
        self._start = replace(self._start, step=step, trained_s=self._at[step])
        if len(self._at) > _NUM_STEPS:
            del self._at[next(iter(self._at))]

    def saved(self, step: int) -> None:
        trained_s = self._at.get(step, self._start.trained_s)
        self._start = replace(self._start, saves=(*self._start.saves, (step, trained_s))[-_NUM_SAVES:])
        self._at = {later: at for later, at in self._at.items() if later > step}

    def gone_back(self, step: int) -> None:
        """Records a rollback to the checkpoint of `step`: later updates of the run are lost."""
        start = self._start
        begin = step if start.start_step is None else start.start_step
        # this start spent no time on the checkpoint that it began with, or on an earlier one
        kept_s = dict(start.saves).get(step, 0.0)
        self._start = replace(
            start,
            # updates of earlier starts beyond that checkpoint count as lost by a restart
            start_step=min(step, begin),
            step=step,
            trained_s=kept_s,
            saves=tuple(save for save in start.saves if save[0] <= step),
            lost_steps=start.lost_steps + start.step - max(step, begin),
            lost_s=start.lost_s + start.trained_s - kept_s,
        )
        self._at.clear()

    def write(self) -> None:
        """Writes the account; raises OSError if the disk fails. The heartbeat's thread calls it."""
        if not self._is_writer:
            return
        phases = {} if self._heartbeat is None else self._heartbeat.phases_s
        start, now_s = self._start, time.time()
        # includes the time before the heartbeat: starting programs, meeting ranks, locking the folder
        phases["start"] = max(0.0, now_s - start.began_s - sum(phases.values())) + phases.get("start", 0.0)
        write_start(self._folder, replace(start, written_s=now_s, phases_s=phases))
