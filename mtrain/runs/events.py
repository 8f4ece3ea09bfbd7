"""events.jsonl: what happened to a run beside its steps, one line each.

A later start takes nothing back, so the file tells of every start, also of those whose steps were repeated. It is for
people: what cannot be written is lost, and what cannot be read is left out.
"""

from __future__ import annotations

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
    """What happened."""

    START = "start"
    """Rank 0 has taken the run folder; facts: num_steps, world_size, layout, device, name, job."""
    RESUME = "resume"
    """The model is built, and training goes on after `step`; fact `reached`: what earlier starts had
    recorded, so that steps between the two are repeated."""
    SAVE = "save"
    """A checkpoint is on disk; fact `seconds`."""
    ALARM = "alarm"
    """Something that people should see, while the run goes on."""
    ROLLBACK = "rollback"
    """The run went back to the checkpoint of `step`."""
    STOP = "stop"
    """It ended early and wants to be started again."""
    FAILURE = "failure"
    """It ended by an error, which `text` gives; fact `exit_code`."""
    FINISH = "finish"
    """All steps are done."""


ENDS = frozenset({EventKind.STOP, EventKind.FAILURE, EventKind.FINISH})
"""After one of these nothing happens until the next start."""


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """One line."""

    kind: EventKind
    step: int
    """Optimizer updates completed."""
    time_s: float
    """Unix time."""
    text: str = ""
    """For people."""
    rank: int = 0
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Numbers and names that belong to the kind."""


class EventLog:
    """Writes the events of one rank."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        """
        Args:
            path: The run folder's events.jsonl; its folder must exist.
            rank: Of this process.
        """
        self._path, self._rank = path, rank

    def write(self, kind: EventKind, step: int, text: str = "", facts: Mapping[str, Fact] | None = None) -> None:
        """Appends one event; a disk that refuses costs the event alone."""
        event = RunEvent(kind=kind, step=step, time_s=time.time(), text=text, rank=self._rank, facts=facts or {})
        data = json.dumps(asdict(event)).encode() + b"\n"
        with suppress(OSError):
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                size_bytes = os.fstat(file).st_size
                is_torn = size_bytes > 0 and os.pread(file, 1, size_bytes - 1) != b"\n"
                os.write(file, b"\n" * is_torn + data)  # a line that was cut costs itself alone
            finally:
                os.close(file)


def read_events(path: Path) -> list[RunEvent]:
    """All events by time; empty where there is no file. Lines that are no events of this program are left out."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    found = [event for line in lines if (event := _event(line)) is not None]
    return sorted(found, key=lambda event: event.time_s)


def _event(line: bytes) -> RunEvent | None:
    try:
        content = json.loads(line)
        event = RunEvent(**(content | {"kind": EventKind(content["kind"])}))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    kinds = (
        (event.step, int),
        (event.time_s, (int, float)),
        (event.text, str),
        (event.rank, int),
        (event.facts, dict),
    )
    return event if all(isinstance(value, kind) for value, kind in kinds) else None
