"""Goodput: the share of a run's time in steps that it kept, over all of its starts.

Pure arithmetic on `starts/` of the run folder (`mtrain.runs.starts`); no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mtrain.runs.starts import RunStart, read_starts


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
        """Returns effective_s / wall_s."""
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
        seconds += start.trained_s - _trained_until(start, begin, kept)
    return steps, seconds


def _trained_until(start: RunStart, begin: int, step: int) -> float:
    """Returns a start's seconds in its steps up to `step`: as recorded at that save, else in proportion."""
    noted = dict(start.saves)
    return noted.get(step, start.trained_s * (step - begin) / (start.step - begin))


def _readable(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 120 else f"{minutes} min"
