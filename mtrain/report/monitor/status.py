"""Status of a run folder at one moment, for `mtrain status`, while the folder may be written to.

It loads neither torch nor the configuration's schema, so it answers at once.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtrain.base.errors import DataError, MachineError
from mtrain.base.heartbeat import Beat, read_beat
from mtrain.checkpoint.store.steps import published_steps
from mtrain.report.metrics.record import StepRecord, ValidRecord, from_json_line, to_json_line
from mtrain.report.monitor.state import Signs, Standing, latest_start, standing
from mtrain.runs.events import EventKind, RunEvent, read_events
from mtrain.runs.failure import FailureRecord, last_failure, last_summary
from mtrain.runs.folder import RunFolder
from mtrain.runs.goodput import Goodput, goodput_of, read_starts

_TAIL_BYTES = 2**18
"""Bytes at the end of metrics.jsonl that are read: some hundred steps of a long run."""
PACE_STEPS = 50
"""Steps whose pace predicts the remaining time, including what happens between them."""
_MAX_ALARMS = 5


@dataclass(frozen=True)
class RunStatus:
    """Status of a run at one moment."""

    folder: Path
    name: str
    standing: Standing
    num_steps: int | None
    last: StepRecord | None
    """Latest step; None before the first."""
    last_pass: ValidRecord | None
    """Latest validation; None before the first."""
    eta_s: float | None
    """Seconds to the last step, at the latest pace; None if unknown."""
    world_size: int
    """Ranks of the latest start; 0 if unknown."""
    num_beating: int
    """Ranks of the latest start that have not left and are not silent."""
    memory_bytes: int | None
    """Largest memory of a rank in its last step; None if unknown."""
    last_checkpoint: int | None
    """Step of the newest checkpoint; None without one."""
    saved_s: float | None
    """Unix time of that checkpoint."""
    num_starts: int
    alarms: tuple[str, ...]
    """Alarms of the latest start, the newest last."""
    goodput: Goodput | None = None
    """Goodput over all starts; None without an account."""
    failure: FailureRecord | None = None
    """First cause if the latest start has failed."""
    summary: str = ""
    """Summary of that failure for people."""

    @property
    def step(self) -> int:
        return 0 if self.last is None else self.last.step

    def as_json(self) -> dict[str, Any]:
        """Returns the status for programs; records have the form of metrics.jsonl."""
        now_s = time.time()
        return {
            "folder": str(self.folder),
            "name": self.name,
            "state": str(self.standing.state),
            "reason": self.standing.reason,
            "since_s": self.standing.since_s,
            "step": self.step,
            "num_steps": self.num_steps,
            "eta_s": self.eta_s,
            "last_step": None if self.last is None else json.loads(to_json_line(self.last)),
            "last_validation": None if self.last_pass is None else json.loads(to_json_line(self.last_pass)),
            "memory_bytes": self.memory_bytes,
            "ranks": self.world_size,
            "ranks_beating": self.num_beating,
            "silent_ranks": list(self.standing.silent_ranks),
            "last_checkpoint": self.last_checkpoint,
            "checkpoint_age_s": None if self.saved_s is None else max(0.0, now_s - self.saved_s),
            "starts": self.num_starts,
            "alarms": list(self.alarms),
            "goodput": None if self.goodput is None else {**asdict(self.goodput), "fraction": self.goodput.fraction},
            "failure": None if self.failure is None else asdict(self.failure),
        }


def read_status(path: Path, now_s: float | None = None) -> RunStatus:
    """Reads the status of a run folder at the Unix time `now_s`, by default now."""
    if not is_run_folder(path):
        raise DataError(f"{path} holds no run: neither events.jsonl nor metrics.jsonl nor config.yaml; give a run.dir")
    folder, now_s = RunFolder(path), time.time() if now_s is None else now_s
    events = read_events(folder.events)
    latest = latest_start(events)
    steps, passes = _tail(folder.metrics)
    facts = latest[0].facts if latest else {}
    config = {} if latest else _old_config(folder.config)
    beats = read_beats(folder.heartbeats)
    world_size = _whole(facts.get("world_size")) or max([0, *(beat.rank + 1 for beat in beats)])
    last, num_steps = (steps[-1] if steps else None), _whole(facts.get("num_steps", config.get("num_steps")))
    signs = Signs(
        events=events,
        beats=beats,
        world_size=world_size,
        steps=0 if last is None else last.step,
        num_steps=num_steps,
        requeue=_text(folder.requeue_marker),
        written_s=_modified_s(folder.metrics),
    )
    found = standing(signs, now_s)
    own = [beat for beat in beats if not latest or (beat.written_s >= latest[0].time_s - 5 and beat.rank < world_size)]
    checkpoint = _last_checkpoint(folder.checkpoints)
    return RunStatus(
        folder=path,
        name=str(facts.get("name") or path.resolve().name),
        standing=found,
        num_steps=num_steps,
        last=last,
        last_pass=passes[-1] if passes else None,
        eta_s=_eta_s(steps, num_steps, latest),
        world_size=world_size,
        num_beating=sum(beat.left_with is None and beat.rank not in found.silent_ranks for beat in own),
        memory_bytes=max((beat.memory_bytes for beat in own if beat.memory_bytes is not None), default=None),
        last_checkpoint=checkpoint,
        saved_s=None if checkpoint is None else _saved_s(folder, checkpoint, events),
        num_starts=sum(event.kind is EventKind.START for event in events),
        alarms=tuple(_alarms(latest, steps))[-_MAX_ALARMS:],
        goodput=goodput_of(read_starts(folder.starts)),
        failure=last_failure(path),
        summary=last_summary(path),
    )


def is_run_folder(path: Path) -> bool:
    folder = RunFolder(path)
    return any(file.is_file() for file in (folder.events, folder.metrics, folder.config))


def find_runs(names: Sequence[str]) -> list[Path]:
    """Finds the run folders that arguments name, in order: run folders, folders of runs, and patterns."""
    found: dict[Path, None] = {}
    for name in names:
        runs = [run for path in _expanded(name) for run in _runs_below(path)]
        if not runs:
            raise DataError(
                f"{name} is not a run folder and contains none (no events.jsonl, metrics.jsonl or config.yaml, "
                "two levels down); give a run.dir, a folder of them, or a pattern in quotes"
            )
        found |= dict.fromkeys(runs)
    return list(found)


def _expanded(name: str) -> list[Path]:
    path = Path(name)
    if path.exists() or not re.search(r"[*?\[]", name):
        return [path]
    root = Path(path.anchor) if path.is_absolute() else Path()
    return sorted(root.glob(str(path.relative_to(path.anchor) if path.is_absolute() else path)))


def _runs_below(path: Path, levels: int = 2) -> list[Path]:
    if is_run_folder(path):
        return [path]
    if levels == 0 or not path.is_dir():
        return []
    try:
        below = sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    except OSError as fault:
        raise MachineError(f"could not list {path}: {fault.strerror}; check the path and its permissions") from fault
    return [run for each in below for run in _runs_below(each, levels - 1)]


def _tail(path: Path) -> tuple[list[StepRecord], list[ValidRecord]]:
    """Reads the latest steps and validations, each by step; an incomplete line is left out."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")[1 if start else 0 :]
    except OSError:
        return [], []
    steps: dict[int, StepRecord] = {}
    passes: dict[int, ValidRecord] = {}
    for line in lines:
        with suppress(DataError, UnicodeDecodeError):
            match from_json_line(line.decode()):
                case StepRecord() as step:
                    steps[step.step] = step
                case ValidRecord() as validation:
                    passes[validation.step] = validation
    return [steps[number] for number in sorted(steps)], [passes[number] for number in sorted(passes)]


def _eta_s(steps: Sequence[StepRecord], num_steps: int | None, latest: Sequence[RunEvent]) -> float | None:
    if not steps or num_steps is None:
        return None
    left = max(0, num_steps - steps[-1].step)
    began_s = latest[0].time_s if latest else 0.0
    recent = steps[-PACE_STEPS - 1 :]
    timed = [(each.step, each.time_s) for each in recent if each.time_s is not None and each.time_s >= began_s]
    if len(timed) > 1:
        first, last = timed[0], timed[-1]
        return (last[1] - first[1]) / (last[0] - first[0]) * left
    return sum(step.seconds for step in recent) / len(recent) * left


def read_beats(folder: Path) -> list[Beat]:
    """Reads the latest beat of each rank that has one; `folder` is the run's `heartbeats`."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    ranks = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"rank_(\d+)\.json", name)))
    return [beat for rank in ranks if (beat := read_beat(folder, rank)) is not None]


def _alarms(latest: Sequence[RunEvent], steps: Sequence[StepRecord]) -> list[str]:
    reported = [f"step {event.step}: {event.text}" for event in latest if event.kind is EventKind.ALARM]
    reported += [f"rolled back to step {each.step}: {each.text}" for each in latest if each.kind is EventKind.ROLLBACK]
    return [*(f"step {step.step}: skipped, {step.skipped}" for step in steps if step.skipped is not None), *reported]


def _last_checkpoint(folder: Path) -> int | None:
    with suppress(MachineError):
        return max(published_steps(folder), default=None)
    return None


def _saved_s(folder: RunFolder, step: int, events: Sequence[RunEvent]) -> float | None:
    saved = [event.time_s for event in events if event.kind is EventKind.SAVE and event.step == step]
    return saved[-1] if saved else _modified_s(folder.checkpoints / f"step_{step:08d}")


def _old_config(path: Path) -> dict[str, Any]:
    """Reads `num_steps` of a run without events."""
    from mtrain.base.yaml_text import read_yaml  # only here, as it takes longer to load than all the rest

    with suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        content: Any = read_yaml(path.read_text()).content
        return {"num_steps": content["train"]["num_steps"]}
    return {}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _modified_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
