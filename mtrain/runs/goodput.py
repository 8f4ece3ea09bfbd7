"""Starts of a run: each has an increasing number, and a small file with its account, from which goodput follows.

The number tells an older start from a newer one without locks (`mtrain.runs.lock`). Goodput is the share of a run's
time in steps that it kept, over all of its starts: pure arithmetic on their files; no torch.
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


@dataclass(frozen=True)
class Goodput:
    """Use of a run's wall time, in seconds; steps are optimizer updates."""

    effective_s: float
    """Time in steps that the run still has."""
    wall_s: float
    """Time from the first start to the last sign of life of the last one."""
    waiting_s: float
    """Time between starts: in the queue, or until somebody restarted it."""
    start_up_s: float
    """Time from a start to its first step: programs load, ranks meet, model, data and checkpoint are read."""
    saving_s: float
    """Time in which training waited for saves."""
    validation_s: float
    export_s: float
    """Time of the export after the last step."""
    lost_s: float
    """Time in steps that were lost, as no checkpoint had them."""
    other_s: float
    """Remaining time: records, polls, and the time of a killed start after its last account."""
    lost_steps: int
    """Updates that were repeated after a restart or a rollback."""
    num_starts: int

    @property
    def restarts(self) -> int:
        """Starts after the first."""
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
        rest = ", ".join(f"{name} {_readable(seconds)}" for name, seconds in parts.items() if seconds >= 0.05)
        return [
            f"goodput {self.fraction:.1%}: {_readable(self.effective_s)} in steps that count, of "
            f"{_readable(self.wall_s)}" + (f" ({rest})" if rest else ""),
            f"restarts {self.restarts}, lost steps {self.lost_steps}",
        ]


def goodput_of(starts: Sequence[RunStart]) -> Goodput | None:
    """Computes the goodput over the starts of one run; None without any."""
    if not starts:
        return None
    lost_steps, lost_s = _lost(starts)
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
    """Computes the goodput of a run folder; None without any start."""
    return goodput_of(read_starts(run_dir / "starts"))


def _lost(starts: Sequence[RunStart]) -> tuple[int, float]:
    """Counts the steps that a later start repeated, and their seconds."""
    steps, seconds = 0, 0.0
    for number, start in enumerate(starts):
        begin = start.start_step
        if begin is None or start.step <= begin:
            continue
        # every later start resumes at this step or later: updates beyond the lowest of them are gone
        resumed = min(
            (later.start_step for later in starts[number + 1 :] if later.start_step is not None), default=None
        )
        if resumed is None or resumed >= start.step:
            continue
        kept = max(resumed, begin)
        steps += start.step - kept
        # as recorded at that save, else in proportion
        in_proportion = start.trained_s * (kept - begin) / (start.step - begin)
        seconds += start.trained_s - dict(start.saves).get(kept, in_proportion)
    return steps, seconds


def _readable(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 120 else f"{minutes} min"


_log = logging.getLogger(__name__)

_NUM_SAVES = 8
_NUM_STEPS = 1000
"""Steps whose times are kept; the lost time of a save that takes longer to reach the disk is only estimated."""


class StartAccount:
    """Account of this start (`mtrain.runs.goodput`), which rank 0 keeps inside the `with` block and then prints as
    goodput."""

    def __init__(self, folder: Path, number: int, rank: int, world_size: int) -> None:
        self._folder, self._is_writer = folder, rank == 0
        job, now_s, pulse = os.environ.get("SLURM_JOB_ID"), time.time(), current_pulse()
        # replaced as a whole: the heartbeat's thread writes it while training continues
        self._start = RunStart(
            number=number,
            # in a user's program, whose beginning is not known, the current time
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
            return  # a full disk: the account of some seconds ago is still there
        if goodput is not None and self._start.step and kind is None:
            for line in goodput.lines():
                _log.info(line)

    def follow(self, heartbeat: Heartbeat) -> None:
        """Writes the account at every beat, with the time that the heartbeat has seen in each phase."""
        self._heartbeat = heartbeat
        heartbeat.on_beat.append(self.write)

    def goes_on(self, step: int) -> None:
        """Sets the number of updates at the beginning of this start."""
        self._start = replace(self._start, start_step=step, step=step)

    def completed(self, step: int, seconds: float) -> None:
        """Counts one more update, which took `seconds`."""
        self._at[step] = self._start.trained_s + seconds
        self._start = replace(self._start, step=step, trained_s=self._at[step])
        if len(self._at) > _NUM_STEPS:
            del self._at[next(iter(self._at))]

    def saved(self, step: int) -> None:
        trained_s = self._at.get(step, self._start.trained_s)
        self._start = replace(self._start, saves=(*self._start.saves, (step, trained_s))[-_NUM_SAVES:])
        self._at = {later: at for later, at in self._at.items() if later > step}

    def gone_back(self, step: int) -> None:
        """Records that the run goes back to a checkpoint: later updates are lost and will be repeated."""
        start = self._start
        begin = step if start.start_step is None else start.start_step
        # for the checkpoint that this start began with, or an earlier one, no time was spent in this start
        kept_s = dict(start.saves).get(step, 0.0)
        self._start = replace(
            start,
            # updates of earlier starts beyond that checkpoint are lost as in a restart
            start_step=min(step, begin),
            step=step,
            trained_s=kept_s,
            saves=tuple(save for save in start.saves if save[0] <= step),
            lost_steps=start.lost_steps + start.step - max(step, begin),
            lost_s=start.lost_s + start.trained_s - kept_s,
        )
        self._at.clear()

    def write(self) -> None:
        """Writes the account from the heartbeat's thread; raises OSError if the disk refuses."""
        if not self._is_writer:
            return
        phases = {} if self._heartbeat is None else self._heartbeat.phases_s
        start, now_s = self._start, time.time()
        # includes the time before the heartbeat: programs start, ranks meet and take the folder
        phases["start"] = max(0.0, now_s - start.began_s - sum(phases.values())) + phases.get("start", 0.0)
        write_start(self._folder, replace(start, written_s=now_s, phases_s=phases))
