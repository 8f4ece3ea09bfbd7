"""Events of a run: what was written is read, and a torn line loses only itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mtrain.runs.events import EventKind, EventLog, RunEvent, read_events


def kinds(path: Path) -> list[str]:
    return [event.kind for event in read_events(path)]


def test_events_come_back_with_all_they_tell(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", rank=3)
    log.write(EventKind.START, 0, facts={"num_steps": 9, "name": None})
    log.write(EventKind.FAILURE, 4, "DataError: no\nsuch file", {"exit_code": 3})
    start, failure = read_events(tmp_path / "events.jsonl")
    assert (start.kind, start.step, start.rank, start.facts) == (EventKind.START, 0, 3, {"num_steps": 9, "name": None})
    assert (failure.text, failure.facts) == ("DataError: no\nsuch file", {"exit_code": 3})
    assert start.time_s <= failure.time_s


def test_a_run_without_events_has_none(tmp_path: Path) -> None:
    assert read_events(tmp_path / "events.jsonl") == []


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write(EventKind.START, 0)
    log.write(EventKind.SAVE, 2)
    os.truncate(path, path.stat().st_size - 7)
    assert kinds(path) == ["start"]
    log.write(EventKind.FINISH, 4)
    assert kinds(path) == ["start", "finish"]


@pytest.mark.parametrize(
    "line",
    [b"", b"\xff\xfe", b"[]", b"{}", b'{"kind": "unheard of"}', b"[" * 100_000, b'{"kind": "stop", "step": "1"}'],
    ids=["empty", "bytes", "list", "object", "kind", "deep", "types"],
)
def test_what_is_no_event_is_left_out(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).write(EventKind.START, 0)
    with path.open("ab") as file:
        file.write(line + b"\n")
    EventLog(path).write(EventKind.STOP, 1)
    assert kinds(path) == ["start", "stop"]


def test_events_of_several_ranks_are_in_the_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    late, early = (
        RunEvent(kind=EventKind.ALARM, step=1, time_s=time_s, rank=rank) for time_s, rank in [(9.5, 0), (3, 1)]
    )
    lines = [json.dumps(event.__dict__) for event in (late, early)]
    path.write_text("\n".join(lines) + "\n")
    assert [event.rank for event in read_events(path)] == [1, 0]


def test_a_place_that_takes_no_event_stops_nothing(tmp_path: Path) -> None:
    EventLog(tmp_path / "nowhere" / "events.jsonl").write(EventKind.START, 0)
    assert not (tmp_path / "nowhere").exists()
