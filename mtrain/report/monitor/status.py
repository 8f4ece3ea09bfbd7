"""State and latest numbers of a run for `mtrain status`, from a run folder that a run may be writing to.

This module loads neither torch nor the configuration's schema, so it answers at once.
"""

import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mtrain.base.errors import DataError, MachineError
from mtrain.base.heartbeat import Beat, Phase, read_beat
from mtrain.checkpoint.store.steps import published_steps, step_name
from mtrain.report.metrics.jsonl import read_tail
from mtrain.report.metrics.record import PACE_STEPS, StepRecord, ValidRecord, remaining_s, to_json_line
from mtrain.runs.events import ENDS, EventKind, RunEvent, read_events
from mtrain.runs.failure import FailureRecord, last_failure, last_summary
from mtrain.runs.folder import RunFolder
from mtrain.runs.goodput import Goodput, goodput_of_run

_TAIL_BYTES = 2**18
"""Number of bytes to read at the end of metrics.jsonl: a few hundred steps."""
_MAX_ALARMS = 5
SILENT_AFTER_S = 15.0
"""Seconds without a beat after which a rank is silent: ranks beat every second, and a shared file system is late."""
_RANKS_A_SECOND = 100
"""Scale of that time for large runs: each of n ranks beats every n / 500 seconds and may miss five beats."""
_CLOCKS_S = 5.0
"""Largest difference between the clocks of nodes, in seconds."""


class RunState(StrEnum):
    STARTING = "starting"
    """The ranks build model and data."""
    RUNNING = "running"
    SAVING = "saving"
    """The ranks wait for a checkpoint, or the run writes its last one."""
    STOPPED = "stopped for requeue"
    FINISHED = "finished"
    FAILED = "failed"
    SILENT = "silent"
    """The run has not ended, but none of its ranks shows a sign of life."""
    UNKNOWN = "not started"
    """The folder exists, but nothing shows a start."""


@dataclass(frozen=True)
class Standing:
    """State of a run, with its time and reason."""

    state: RunState
    since_s: float | None
    """Unix time at which the state began; None if unknown."""
    reason: str = ""
    silent_ranks: tuple[int, ...] = ()
    """Ranks that show no sign of life, or have not begun, while other ranks beat."""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)


@dataclass(frozen=True)
class Signs:
    """Contents of a run folder that determine the state."""

    events: Sequence[RunEvent]
    beats: Sequence[Beat]
    """Latest beat of each rank, from any start."""
    world_size: int
    """World size of the latest start; 0 if unknown."""
    steps: int
    """Completed steps."""
    num_steps: int | None
    """`train.num_steps`; None if unknown."""
    requeue: str | None
    """Text of the requeue marker; None if the run has none."""
    written_s: float | None
    """Unix time of the last write to metrics.jsonl; None if the file does not exist."""


@dataclass(frozen=True)
class RunStatus:
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
    """Step of the newest checkpoint; None if the run has none."""
    saved_s: float | None
    """Unix time of the newest checkpoint; None if the run has none."""
    num_starts: int
    alarms: tuple[str, ...]
    """Alarms of the latest start, the newest last."""
    goodput: Goodput | None = None
    """Goodput over all starts; None if the run has not recorded it."""
    failure: FailureRecord | None = None
    """First cause if the latest start has failed."""
    summary: str = ""

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


def latest_start(events: Sequence[RunEvent]) -> Sequence[RunEvent]:
    indices = [index for index, event in enumerate(events) if event.kind is EventKind.START]
    return events[indices[-1] :] if indices else ()


def standing(signs: Signs, now_s: float) -> Standing:
    """Determines the state at the Unix time `now_s`."""
    events = latest_start(signs.events)
    since_s = events[0].time_s - _CLOCKS_S if events else 0.0
    beats = [beat for beat in signs.beats if beat.written_s >= since_s]
    if any(event.kind in ENDS for event in events):
        return _ended(events, signs)
    failed = [beat for beat in beats if beat.left_with not in (None, "done")]
    if failed:  # no event recorded the error
        causes = [beat for beat in failed if beat.left_with != "RankLostError"] or failed
        first = min(causes, key=lambda beat: beat.written_s)
        return Standing(RunState.FAILED, first.written_s, f"rank {first.rank}: {first.left_with} in {first.place}")
    if not events:  # a run of an earlier version, which wrote no events
        if signs.requeue is not None:
            return Standing(RunState.STOPPED, signs.written_s, signs.requeue)
        is_done = signs.num_steps is not None and signs.steps >= signs.num_steps
        if is_done and all(beat.left_with == "done" for beat in beats):
            return Standing(RunState.FINISHED, signs.written_s)
    limit_s = max(SILENT_AFTER_S, signs.world_size / _RANKS_A_SECOND)
    alive = [beat for beat in beats if now_s - beat.written_s <= limit_s and beat.left_with is None]
    if not alive:
        return _standing_without_beats(events, beats, signs, now_s - limit_s)
    left = {beat.rank for beat in beats if beat.left_with is not None}
    silent = sorted(set(range(signs.world_size)) - {beat.rank for beat in alive} - left)
    if events and now_s - events[0].time_s <= limit_s:
        silent = []  # these ranks may just be starting
    last = max(alive, key=lambda beat: beat.progress)
    state = RunState.RUNNING
    if last.phase in (Phase.START, Phase.BUILD):
        state = RunState.STARTING
    elif last.phase in (Phase.SAVE, Phase.EXPORT):
        state = RunState.SAVING
    return Standing(state, last.since_s, silent_ranks=tuple(silent))


def _ended(events: Sequence[RunEvent], signs: Signs) -> Standing:
    ends = [event for event in events if event.kind in ENDS]
    last = ends[-1]
    failures = [event for event in ends if event.kind is EventKind.FAILURE]
    if failures:
        causes = [event for event in failures if not event.text.startswith("RankLostError")]
        first = (causes or failures)[0]
        return Standing(RunState.FAILED, last.time_s, f"rank {first.rank}: {first.text}")
    if last.kind is EventKind.STOP:
        gone = "" if signs.requeue is not None else "; the REQUEUE marker has been removed"
        return Standing(RunState.STOPPED, last.time_s, last.text + gone)
    return Standing(RunState.FINISHED, last.time_s)


def _standing_without_beats(
    events: Sequence[RunEvent], beats: Sequence[Beat], signs: Signs, limit_s: float
) -> Standing:
    """Returns the state if no rank beats; signs of life before the Unix time `limit_s` are too old."""
    times = [*(beat.written_s for beat in beats), *(event.time_s for event in events)]
    if not events and signs.written_s is not None:
        times.append(signs.written_s)
    if not times:
        return Standing(RunState.UNKNOWN, None)
    if max(times) <= limit_s:
        return Standing(RunState.SILENT, max(times))
    return Standing(RunState.RUNNING if signs.steps and not events else RunState.STARTING, max(times))


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
    state = standing(signs, now_s)
    since_s = latest[0].time_s - _CLOCKS_S if latest else 0.0
    latest_beats = [beat for beat in beats if not latest or (beat.written_s >= since_s and beat.rank < world_size)]
    checkpoint, saved_s = None, None
    with suppress(MachineError):
        checkpoint = max(published_steps(folder.checkpoints), default=None)
    if checkpoint is not None:
        saves = [event.time_s for event in events if event.kind is EventKind.SAVE and event.step == checkpoint]
        saved_s = saves[-1] if saves else _modified_s(folder.checkpoints / step_name(checkpoint))
    return RunStatus(
        folder=path,
        name=str(facts.get("name") or path.resolve().name),
        standing=state,
        num_steps=num_steps,
        last=last,
        last_pass=passes[-1] if passes else None,
        eta_s=_eta_s(steps, num_steps, latest),
        world_size=world_size,
        num_beating=sum(beat.left_with is None and beat.rank not in state.silent_ranks for beat in latest_beats),
        memory_bytes=max((beat.memory_bytes for beat in latest_beats if beat.memory_bytes is not None), default=None),
        last_checkpoint=checkpoint,
        saved_s=saved_s,
        num_starts=sum(event.kind is EventKind.START for event in events),
        alarms=tuple(_alarms(latest, steps))[-_MAX_ALARMS:],
        goodput=goodput_of_run(path),
        failure=last_failure(path),
        summary=last_summary(path),
    )


def is_run_folder(path: Path) -> bool:
    folder = RunFolder(path)
    return any(file.is_file() for file in (folder.events, folder.metrics, folder.config))


def find_runs(names: Sequence[str]) -> list[Path]:
    """Finds run folders by name, by a folder that contains them, or by pattern; raises DataError for a name of none."""
    run_folders: dict[Path, None] = {}
    for name in names:
        path = Path(name)
        candidates = [path]
        if not path.exists() and re.search(r"[*?\[]", name):
            candidates = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        runs = [run for folder in candidates for run in _runs_below(folder)]
        if not runs:
            raise DataError(
                f"{name} is not a run folder and contains none (no events.jsonl, metrics.jsonl or config.yaml, "
                "two levels down); give a run.dir, a folder of them, or a pattern in quotes"
            )
        run_folders |= dict.fromkeys(runs)
    return list(run_folders)


def _runs_below(path: Path, levels: int = 2) -> list[Path]:
    if is_run_folder(path):
        return [path]
    if levels == 0 or not path.is_dir():
        return []
    try:
        folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as fault:
        raise MachineError(f"could not list {path}: {fault.strerror}; check the path and its permissions") from fault
    return [run for entry in folders for run in _runs_below(entry, levels - 1)]


def _tail(path: Path) -> tuple[list[StepRecord], list[ValidRecord]]:
    steps: dict[int, StepRecord] = {}
    passes: dict[int, ValidRecord] = {}
    for record in read_tail(path, _TAIL_BYTES):
        if isinstance(record, StepRecord):
            steps.setdefault(record.step, record)
        elif isinstance(record, ValidRecord):
            passes.setdefault(record.step, record)
    return [steps[number] for number in sorted(steps)], [passes[number] for number in sorted(passes)]


def _eta_s(steps: Sequence[StepRecord], num_steps: int | None, latest: Sequence[RunEvent]) -> float | None:
    if not steps or num_steps is None:
        return None
    began_s = latest[0].time_s if latest else 0.0
    recent = steps[-PACE_STEPS - 1 :]
    timed = [(step.step, step.time_s) for step in recent if step.time_s is not None and step.time_s >= began_s]
    if len(timed) > 1:
        return remaining_s(timed, num_steps)
    return sum(step.seconds for step in recent) / len(recent) * max(0, num_steps - steps[-1].step)


def read_beats(folder: Path) -> list[Beat]:
    """Reads the latest beat of each rank; `folder` is the run's `heartbeats`."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    matches = (re.fullmatch(r"rank_(\d+)\.json", name) for name in names)
    beats = (read_beat(folder, rank) for rank in sorted(int(match[1]) for match in matches if match))
    return [beat for beat in beats if beat is not None]


def _alarms(latest: Sequence[RunEvent], steps: Sequence[StepRecord]) -> list[str]:
    reported = [f"step {event.step}: {event.text}" for event in latest if event.kind is EventKind.ALARM]
    rollbacks = (event for event in latest if event.kind is EventKind.ROLLBACK)
    reported += [f"rolled back to step {event.step}: {event.text}" for event in rollbacks]
    return [*(f"step {step.step}: skipped, {step.skipped}" for step in steps if step.skipped is not None), *reported]


def _old_config(path: Path) -> dict[str, Any]:
    from mtrain.base.yaml_text import read_yaml  # only here: it takes longer to load than everything else

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
