"""Run folders for tests, written by the code that writes them in a run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from mtrain.base.heartbeat import Beat, Phase, heartbeat_file
from mtrain.report.metrics.record import Record, to_json_line
from mtrain.runs.events import EventKind, EventLog, Fact
from tests.report.metrics.records import step_record, valid_record

CONFIG = "run: {dir: runs/x, name: first try}\ntrain: {num_steps: 10}\n"


def started(folder: Path, steps: int = 4, num_steps: int = 10, **facts: int | str) -> EventLog:
    """Writes a run that has started, made some steps of 0.5 s and a validation; returns its event log."""
    (folder / "heartbeats").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    log = EventLog(folder / "events.jsonl")
    known: dict[str, Fact] = {
        "num_steps": num_steps,
        "world_size": 2,
        "name": "first try",
        "layout": "tp2",
        "device": "cpu",
    }
    log.write(EventKind.START, 0, facts=known | facts)
    log.write(EventKind.RESUME, 0, facts={"reached": 0})
    append(folder, [timed(step) for step in range(1, steps + 1)])
    append(folder, [valid_record(steps)])
    return log


def timed(step: int, loss: float = 2.5) -> Record:
    """Builds a step that ends half a second after the one before."""
    return replace(step_record(step, loss), time_s=time.time() + 0.5 * step, memory_bytes=2**30)


def append(folder: Path, records: Sequence[Record]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(map(to_json_line, records))


def beats(folder: Path, rank: int, *, ago_s: float = 0, phase: Phase = Phase.UPDATE, memory_bytes: int = 2**30) -> None:
    """Writes the heartbeat of a rank."""
    now = time.time() - ago_s
    beat = Beat(rank, 1, 5, phase, now, now, None, memory_bytes)
    heartbeat_file(folder / "heartbeats", rank).write_text(json.dumps(asdict(beat)))
