"""events.jsonl: the events of a run other than its steps, one per line.

A later start removes nothing, so the file covers every start, including those whose steps were repeated. The file is
for people: events that cannot be written are lost, and lines that cannot be read are skipped.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

Fact = int | float | str | bool | None


class EventKind(StrEnum):
    START = "start"
    """Rank 0 has locked the run folder; facts: num_steps, world_size, layout, device, name, job."""
    RESUME = "resume"
    """The model is built, and training continues after `step`; fact `reached`: the last step that earlier starts
    recorded, so the steps in between are repeated."""
    SAVE = "save"
    """A checkpoint is on disk; fact `seconds`."""
    ALARM = "alarm"
    """A problem that people should see; the run continues."""
    ROLLBACK = "rollback"
    """The run went back to the checkpoint of `step`."""
    STOP = "stop"
    """The run ended early and wants to be restarted."""
    FAILURE = "failure"
    """The run ended with the error in `text`; fact `exit_code`."""
    FINISH = "finish"


ENDS = frozenset({EventKind.STOP, EventKind.FAILURE, EventKind.FINISH})


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    kind: EventKind
    step: int
    time_s: float
    text: str = ""
    rank: int = 0
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Values that the kind of event defines."""


class EventLog:
    def __init__(self, path: Path, rank: int = 0) -> None:
        self._path, self._rank = path, rank

    def write(self, kind: EventKind, step: int, text: str = "", facts: Mapping[str, Fact] | None = None) -> None:
        """Appends one event; if the disk fails, only the event is lost."""
        event = RunEvent(kind=kind, step=step, time_s=time.time(), text=text, rank=self._rank, facts=facts or {})
        data = json.dumps(asdict(event)).encode() + b"\n"
        with suppress(OSError):
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                size_bytes = os.fstat(file).st_size
                is_torn = size_bytes > 0 and os.pread(file, 1, size_bytes - 1) != b"\n"
                os.write(file, b"\n" * is_torn + data)  # after a torn line, the new event starts on a new line
            finally:
                os.close(file)


def read_events(path: Path) -> list[RunEvent]:
    """Reads all events, sorted by time; empty without a file. Lines that are not events are skipped."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    events = [event for line in lines if (event := _event(line)) is not None]
    return sorted(events, key=lambda event: event.time_s)


def _event(line: bytes) -> RunEvent | None:
    try:
        content = json.loads(line)
        event = RunEvent(**(content | {"kind": EventKind(content["kind"])}))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    kinds = ((event.step, int), (event.time_s, (int, float)), (event.text, str), (event.rank, int), (event.facts, dict))
    return event if all(isinstance(value, kind) for value, kind in kinds) else None
