"""Writes the data ledger of one rank while it trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from mtrain.base.files import disk_faults
from mtrain.data.ledger import StartEntry, StepEntry, to_line
from mtrain.metrics.appended import AppendedFile
from mtrain.metrics.record import Record, StepRecord


class Entries(Protocol):
    """Source of ledger entries."""

    def next_entry(self, step: int) -> StepEntry:
        """Returns the entry of the batches that were trained in a step, counted from 1."""


class LedgerSink:
    """Writes the entry of every step whose record it is given."""

    def __init__(self, folder: Path, dp_rank: int, entries: Entries, start: StartEntry) -> None:
        """Opens the file of this rank; `rewind_ledger` has removed entries after the start.

        Raises:
            MachineError: The disk refuses.
        """
        with disk_faults(f"make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        self._entries = entries
        self._file = AppendedFile(folder / f"dp_{dp_rank:05d}.jsonl", first=to_line(start))

    def write(self, record: Record) -> None:
        """Appends the entry of a step; other records are ignored."""
        if isinstance(record, StepRecord):
            entry = replace(self._entries.next_entry(record.step), skipped=record.skipped is not None)
            self._file.append(record.step, to_line(entry))

    def close(self) -> None:
        """Closes the file.

        Raises:
            MachineError: The disk has refused entries, up to the last attempt.
        """
        self._file.close()
