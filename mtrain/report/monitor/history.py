"""History of a run over all of its starts, from its run folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults
from mtrain.base.heartbeat import Beat
from mtrain.report.metrics.plot import Curves, load_curves
from mtrain.report.monitor.status import RunStatus, read_beats, read_status
from mtrain.runs.events import ENDS, EventKind, RunEvent, read_events
from mtrain.runs.folder import RunFolder


@dataclass(frozen=True)
class StartOfHistory:
    """One start in the history of a run."""

    began_s: float
    """Unix time at which the start began."""
    resumed_step: int | None
    """Updates before its first one; None if it ended before that was known."""
    num_repeated: int
    """Updates of earlier starts that this start repeated."""
    last_step: int
    """Updates completed at its end, as far as known."""
    seconds: float
    """Wall time until its end, or its last sign of life."""
    end: str
    """How it ended."""
    layout: str
    num_ranks: int


@dataclass(frozen=True)
class Answer:
    """Answer to one of `eval.prompts`."""

    step: int
    prompt: str
    answer: str


@dataclass(frozen=True)
class RunHistory:
    """Complete history of one run."""

    status: RunStatus
    curves: Curves
    events: Sequence[RunEvent]
    starts: Sequence[StartOfHistory]
    beats: Sequence[Beat]
    config: str
    """Configuration as YAML; empty if unknown."""
    environment: dict[str, str]
    answers: Sequence[Answer] = ()
    """Answers to `eval.prompts`, in order of time."""


def read_history(path: Path, now_s: float) -> RunHistory:
    """Reads a run folder, even while the run is in progress; `now_s` is Unix time.

    Raises:
        DataError: The folder holds no run or no step yet, or a file of it is damaged.
        MachineError: The folder cannot be read.
    """
    folder, status = RunFolder(path), read_status(path, now_s)
    events = read_events(folder.events)
    return RunHistory(
        status=status,
        curves=load_curves(path),
        events=events,
        starts=tuple(_starts(events, status, now_s)),
        beats=read_beats(folder.heartbeats),
        config=folder.saved_config() or "",
        environment=folder.saved_environment() or {},
        answers=tuple(_answers(folder.samples)),
    )


def _answers(path: Path) -> Iterator[Answer]:
    """Reads the answers; the last line may be incomplete while the run goes on."""
    if not path.exists():
        return
    with disk_faults(f"read {path}"):
        lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            yield Answer(int(record["step"]), _asked(record["prompt"]), str(record["answer"]))
        except (ValueError, TypeError, KeyError, RecursionError) as fault:
            raise DataError(f"{path}:{number} is no answer to a prompt ({fault}); move the file away") from None


def _asked(prompt: object) -> str:
    """Returns the last message of a conversation, or the text itself."""
    messages = prompt.get("messages", prompt.get("prompt")) if isinstance(prompt, dict) else prompt
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        return str(messages[-1].get("content"))
    return str(messages)


def _starts(events: Sequence[RunEvent], status: RunStatus, now_s: float) -> Iterator[StartOfHistory]:
    places = [place for place, event in enumerate(events) if event.kind is EventKind.START]
    for first, after in itertools.zip_longest(places, places[1:]):
        own = events[first:after]
        resumed = next((event for event in own if event.kind is EventKind.RESUME), None)
        ends = [event for event in own if event.kind in ENDS]
        if ends:
            ended_s, end = ends[-1].time_s, _words(ends)
        elif after is None:
            ended_s, end = now_s, str(status.standing)
        else:
            ended_s, end = own[-1].time_s, "no end is recorded: it was killed"
        reached = next((each.facts.get("reached") for each in events[first:] if _is_next_resume(each, own)), None)
        steps = [event.step for event in own] + ([reached] if isinstance(reached, int) else [])
        yield StartOfHistory(
            began_s=own[0].time_s,
            resumed_step=None if resumed is None else resumed.step,
            num_repeated=0 if resumed is None else _number(resumed.facts.get("reached"), resumed.step) - resumed.step,
            last_step=max(status.step, *steps) if after is None else max(steps),
            seconds=ended_s - own[0].time_s,
            end=end,
            layout=str(own[0].facts.get("layout", "")),
            num_ranks=_number(own[0].facts.get("world_size"), 0),
        )


def _is_next_resume(event: RunEvent, own: Sequence[RunEvent]) -> bool:
    """Says whether an event is the resumption of another start, which records how far this one came."""
    return event.kind is EventKind.RESUME and event not in own


def _words(ends: Sequence[RunEvent]) -> str:
    last = ends[-1]
    return f"{last.kind}: {last.text}" if last.text else str(last.kind)


def _number(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise
