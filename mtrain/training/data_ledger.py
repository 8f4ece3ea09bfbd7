"""Writes the data ledger of one rank beside its steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from mtrain.base.files import disk_faults
from mtrain.data.ledger import StartEntry, StepEntry, to_line
from mtrain.metrics.appended import AppendedFile
from mtrain.metrics.record import Record, StepRecord


class Entries(Protocol):
    """Where entries come from."""

    def next_entry(self, step: int) -> StepEntry:
        """Of the batches that were trained for the step with which so many updates are completed."""


class LedgerSink:
    """Writes the entry of every step whose record it is given."""

    def __init__(self, folder: Path, dp_rank: int, entries: Entries, start: StartEntry) -> None:
        """Opens the file of this rank; `rewind_ledger` has taken back what lies beyond the start.

        Raises:
            MachineError: The disk refuses.
        """
        with disk_faults(f"make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        self._entries = entries
        self._file = AppendedFile(folder / f"dp_{dp_rank:05d}.jsonl", first=to_line(start))

    def write(self, record: Record) -> None:
        """Appends the entry of a step; other records are passed over."""
        if isinstance(record, StepRecord):
            entry = replace(self._entries.next_entry(record.step), skipped=record.skipped is not None)
            self._file.append(record.step, to_line(entry))

    def close(self) -> None:
        """Closes the file.

        Raises:
            MachineError: The disk has refused entries to the end.
        """
        self._file.close()
