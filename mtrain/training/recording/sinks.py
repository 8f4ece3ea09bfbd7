"""Sinks of the records of a run, and the data ledger that each rank writes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mtrain.training.recording.life import Life

from mtrain.base.files import disk_faults
from mtrain.base.heartbeat import Heartbeat
from mtrain.config.changes import flat_keys
from mtrain.core.ranks.init import on_first_rank
from mtrain.data.ledger import StartEntry, StepEntry, rewind_ledger, to_line
from mtrain.report.metrics.jsonl import AppendedFile, JsonlSink, last_step
from mtrain.report.metrics.record import ChangeRecord, Record, StepRecord
from mtrain.report.metrics.sinks import ConsoleSink, Sink, Sinks, TensorBoardSink
from mtrain.report.metrics.trackers.open import TrackedRun, refuse_missing, tracked_run, tracker_sink
from mtrain.runs.folder import RunFolder
from mtrain.runs.goodput import StartAccount
from mtrain.runs.lock import RunLock
from mtrain.training.build import Run
from mtrain.training.changed import note_on_order

_log = logging.getLogger(__name__)


class LedgerSink:
    """Writes the entry of every step whose record it is given."""

    def __init__(self, folder: Path, dp_rank: int, next_entry: Callable[[int], StepEntry], start: StartEntry) -> None:
        """Opens the file of this rank; `next_entry` returns the entry of a step, counted from 1."""
        with disk_faults(f"make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        self._next_entry = next_entry
        self._file = AppendedFile(folder / f"dp_{dp_rank:05d}.jsonl", first=to_line(start))

    def write(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            entry = replace(self._next_entry(record.step), skipped=record.skipped is not None)
            self._file.append(record.step, to_line(entry))

    def close(self) -> None:
        """Closes the file; raises MachineError if the disk has refused entries, up to the last attempt."""
        self._file.close()


class SignsOfLife:
    """Passes the progress of this rank on to the heartbeat, the events and the account of the start."""

    def __init__(self, life: Life, heartbeat: Heartbeat, account: StartAccount) -> None:
        self.life, self._heartbeat, self._account = life, heartbeat, account

    def write(self, record: Record) -> None:
        """Passes on a completed step; ignores other records."""
        if isinstance(record, StepRecord):
            self.life.stepped(record.step)
            self._account.completed(record.step, record.seconds)
            if record.memory_bytes is not None:
                self._heartbeat.note_memory(record.memory_bytes)

    def close(self) -> None:
        """Does nothing: the receivers are closed by their owners."""


def open_sinks(run: Run, folder: RunFolder, lock: RunLock, signs: SignsOfLife) -> Sinks:
    """Opens the sinks of this rank, and removes what an earlier start wrote after the start step. Collective.

    Raises:
        ConfigError: A tracker is not installed.
        DataError: A file of an earlier start is damaged.
        MachineError: A file cannot be written.
    """
    metrics, start = run.model.config.metrics, run.start_step
    on_first_rank(lambda: refuse_missing(metrics.trackers))
    ledger, life = _ledger(run, folder), signs.life
    if run.model.groups.rank != 0:
        life.resumed(start, start)
        return Sinks(*ledger, signs)
    life.resumed(start, last_step(folder.metrics))
    console = ConsoleSink(run.model.config.train.num_steps, start, interval_steps=metrics.console_interval_steps)
    keys, environment = flat_keys(run.model.config), folder.saved_environment() or {}
    tracked = tracked_run(folder.path, metrics.project, run.model.config.run, keys, environment)
    others: list[Sink] = [TensorBoardSink(folder.tensorboard, start, _texts(tracked))] if metrics.tensorboard else []
    if start < run.model.config.train.num_steps:
        others += [tracker_sink(name, tracked) for name in dict.fromkeys(metrics.trackers)]
    metrics_file = JsonlSink(folder.metrics, start)
    sinks = Sinks(metrics_file, console, *others, *ledger, signs, check=lock.check_now_and_then)
    if start < run.model.config.train.num_steps:
        new = [ChangeRecord(**each.model_dump()) for each in run.changes if each.step == start]
        for change in new:
            sinks.write(change)
        if (note := note_on_order(new, run.model.config)) is not None:
            _log.info(note)
    return sinks


def _texts(run: TrackedRun) -> dict[str, str]:
    config = "\n".join(f"{key}: {value}" for key, value in run.config.items() if not key.startswith("environment."))
    environment = "\n".join(f"{key}: {value}" for key, value in run.config.items() if key.startswith("environment."))
    return {"config": config, "environment": environment, "notes": f"{run.name}\n{run.notes}"}


def _ledger(run: Run, folder: RunFolder) -> list[LedgerSink]:
    """Opens the data ledger on each rank that reads for a replica of the data. Collective over the world."""
    start, loader = run.start_step, run.loader
    if not run.model.config.metrics.data_ledger or start >= run.model.config.train.num_steps:
        return []
    # also files of ranks that no longer exist; all of them before one is opened
    on_first_rank(lambda: rewind_ledger(folder.ledger, start))
    if loader is None or not run.model.groups.counts_planned:
        return []
    return [LedgerSink(folder.ledger, run.model.groups.dp_rank, loader.next_entry, loader.start_entry(start))]
