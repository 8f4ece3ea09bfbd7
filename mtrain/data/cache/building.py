"""Writes an entry of the token cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from mtrain.base import pulse
from mtrain.base.errors import DataError
from mtrain.base.fault_points import fault_point
from mtrain.base.files import sync_file
from mtrain.base.signals import leave_if_stopped
from mtrain.data.cache.arrays import EXTRAS, OF_SAMPLES, ArrayWriter, EncodedChunk
from mtrain.data.cache.encoding_workers import TOKENISING, EncodingJob, encoded_chunks
from mtrain.data.cache.entry import BadRecords, EntryFacts, write_facts

_MOST_NAMED = 10
"""Number of bad records that are kept with what is wrong."""
_LINE_S = 10.0


class Progress:
    """Line for the user that is printed every few seconds."""

    def __init__(self, num_bytes: int, first_file: Path, say: Callable[[str], None]) -> None:
        """
        Args:
            num_bytes: Total size of all files of the source.
            first_file: First file of the source, which names it in the line.
            say: Function that takes a line.
        """
        self._what, self._say = f"{first_file} ({num_bytes / 1e6:,.0f} MB)", say
        self._began = self._said = time.monotonic()

    def update(self, num_records: int, num_tokens: int) -> None:
        """Prints a line with what is done so far, unless the last one is recent."""
        now = time.monotonic()
        if now - self._said >= _LINE_S:
            self._said = now
            self._line("tokenising", num_records, num_tokens, now)

    def finish(self, num_records: int, num_tokens: int) -> None:
        """Prints a line with what was done in all."""
        self._line("tokenised", num_records, num_tokens, time.monotonic())

    def _line(self, verb: str, num_records: int, num_tokens: int, now: float) -> None:
        seconds = max(now - self._began, 1e-3)
        rate = f"{num_records / seconds:,.0f} records/s"
        self._say(f"{verb} {self._what}: {num_records:,} records, {num_tokens:,} tokens, {rate}")


def build_entry(staging: Path, job: EncodingJob, num_workers: int, stops_at_bad: bool, progress: Progress) -> None:
    """Fills an empty folder with an entry; the same records give the same bytes whatever the number of workers.

    Args:
        staging: Empty folder that becomes the entry.
        job: Files and encoder.
        num_workers: Number of processes that tokenise.
        stops_at_bad: Whether a bad record is an error.
        progress: Progress line, updated after every chunk.

    Raises:
        DataError: A file is damaged, a record is bad, or there is no sample.
        MachineError: A worker died.
        OSError: The disk is full.
    """
    facts = _Facts()
    with ArrayWriter(staging) as writer:
        for number, chunk in enumerate(encoded_chunks(job, num_workers)):
            fault_point("tokenise", 0, number)
            leave_if_stopped(TOKENISING)
            if chunk.bad and stops_at_bad:
                record, why = chunk.bad[0]
                raise DataError(f"{job.files[chunk.file].place(record)}: {why}")
            writer.add(chunk, facts.first_of_file(chunk))
            facts.add(chunk)
            progress.update(facts.num_records, writer.num_tokens)
            pulse.tick()
        if writer.num_samples == 0:
            raise DataError(
                f"{job.files[0].path} holds no sample ({facts.num_bad} of {facts.num_records} records are bad"
                + (f"; {job.files[facts.bad[0][0]].place(facts.bad[0][1])}: {facts.bad[0][2]}" if facts.bad else "")
                + "); give a file that holds samples"
            )
        writer.flush()
    for name in (*OF_SAMPLES, EXTRAS):
        if (staging / name).exists():
            sync_file(staging / name)  # after a crash, opening the entry would notice that another array is not whole
    write_facts(staging, writer, facts.of_entry(len(job.files)))
    progress.finish(facts.num_records, writer.num_tokens)


class _Facts:
    """Facts of an entry that are counted while it is written."""

    def __init__(self) -> None:
        self.num_records = self.num_bad = 0
        self.bad: list[tuple[int, int, str]] = []
        self._file_starts: list[int] = []
        self._highest_id = 0

    def first_of_file(self, chunk: EncodedChunk) -> int:
        """Returns the number of records before the chunk's file; files without records begin where the next one
        does."""
        while len(self._file_starts) <= chunk.file:
            self._file_starts.append(self.num_records)
        return self._file_starts[chunk.file]

    def add(self, chunk: EncodedChunk) -> None:
        self.num_records += chunk.num_records
        self.num_bad += len(chunk.bad)
        room = _MOST_NAMED - len(self.bad)
        self.bad += [(chunk.file, number, why) for number, why in chunk.bad[:room]]
        if len(chunk.ids):
            self._highest_id = max(self._highest_id, int(chunk.ids.max()))

    def of_entry(self, num_files: int) -> EntryFacts:
        starts = (*self._file_starts, *[self.num_records] * (num_files - len(self._file_starts)))
        return EntryFacts(starts, self.num_records, self._highest_id, BadRecords(self.num_bad, tuple(self.bad)))
