"""Records the training data step by step: the samples that each data-parallel rank read, and their contents.

Each rank that reads for a replica writes its own file, so a step needs no further communication; a reader merges them.
An entry does not depend on which rank read a sample into which row: identities follow from the order of samples, and
digests of samples are summed.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults, remove, replacing
from mtrain.base.spelling import counted
from mtrain.config.derived import DataPhase
from mtrain.core.batch.order import SamplePosition
from mtrain.core.batch.sample import Sample
from mtrain.data.steps import fingerprint_until, known_until, windows_in

_DIGESTS = 1 << 64


@dataclass(frozen=True)
class SourceEntry:
    """Samples of one source's epoch that one rank read in a step."""

    source: int
    """Number of the source in data.train."""
    epoch: int
    ids: tuple[int, ...]
    """Numbers of the samples in the source, ascending; a sample read twice appears twice."""
    tokens: int
    """Positions with text."""
    loss_tokens: int
    """Positions with text in the loss of the main term."""


@dataclass(frozen=True)
class StepEntry:
    """Samples that one rank, or all ranks together, read in a step."""

    step: int
    """Updates completed with this step, as in metrics.jsonl."""
    num_samples: int
    """Samples of the global batch, over all ranks."""
    digest: int
    """Sum of the samples' digests modulo 2^64, each over tokens, labels, mask, weight and routed experts; independent
    of who read them and in what order."""
    sources: tuple[SourceEntry, ...]
    skipped: bool = False
    """Whether the step was read without an update."""


@dataclass(frozen=True)
class StartEntry:
    """Facts that all entries up to the next start share."""

    start: int
    """Updates completed before the start."""
    fingerprint: str
    sources: tuple[str, ...]
    """Names of the sources, as in data.train."""
    sizes: tuple[int | None, ...]
    """Samples in an epoch of each source; None for an endless source."""
    phases: tuple[DataPhase, ...] = ()
    """Phases of a curriculum, each with its first step."""


def step_entry(step: int, num_samples: int, read: Collection[tuple[SamplePosition, Sample]]) -> StepEntry:
    """Builds the entry of the samples that a rank has read for a step of `num_samples` over all ranks."""
    parts = []
    for at, sample in read:
        num_loss_tokens = int(np.count_nonzero(sample.mask)) if sample.weight else 0
        parts.append(SourceEntry(at.source, at.epoch, (at.index,), len(sample.tokens), num_loss_tokens))
    return StepEntry(step, num_samples, sum(_digest(sample) for _, sample in read) % _DIGESTS, _merged(parts))


def _merged(parts: Iterable[SourceEntry]) -> tuple[SourceEntry, ...]:
    """Merges the entries of each epoch of a source; in ascending order."""
    epochs: dict[tuple[int, int], list[SourceEntry]] = {}
    for part in parts:
        epochs.setdefault((part.source, part.epoch), []).append(part)
    return tuple(
        SourceEntry(
            *epoch,
            tuple(sorted(index for part in entries for index in part.ids)),
            sum(part.tokens for part in entries),
            sum(part.loss_tokens for part in entries),
        )
        for epoch, entries in sorted(epochs.items())
    )


def _digest(sample: Sample) -> int:
    digest = hashlib.blake2b(np.float64(sample.weight).tobytes(), digest_size=8)
    for part in (sample.tokens, sample.labels, sample.mask, *sample.choices.values()):
        digest.update(np.ascontiguousarray(part).tobytes())
    return int.from_bytes(digest.digest(), "little")


def rewind_ledger(folder: Path, resume_step: int) -> None:
    """Rewinds the files of all ranks to `resume_step`; called before any rank opens its file."""
    with disk_faults(f"rewind {folder} to step {resume_step}"):
        for path in sorted(folder.glob("dp_*.jsonl")):
            if resume_step == 0:
                remove(path)
                continue
            entries = read_file(path)
            lines = [
                to_line(entry)
                for entry in entries
                if (entry.start < resume_step if isinstance(entry, StartEntry) else entry.step <= resume_step)
            ]
            with replacing(path) as new:
                new.write_bytes(b"".join(lines))


def read_file(path: Path) -> Iterator[StartEntry | StepEntry]:
    """Yields the entries of one rank, in order; an unfinished last line is ignored."""
    with disk_faults(f"read {path}"):
        lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            yield from_line(line)
        except (ValueError, TypeError, KeyError) as fault:
            raise DataError(
                f"{path}, line {number}: not an entry of a data ledger ({fault}); remove the file"
            ) from fault


def from_line(line: bytes) -> StartEntry | StepEntry:
    """Parses a line of `to_line`; raises ValueError, TypeError or KeyError for any other line."""
    content: Any = json.loads(line)
    if "start" in content:
        phases = tuple(DataPhase(**entry) for entry in content.get("phases", ()))
        lists = {"sources": tuple(content["sources"]), "sizes": tuple(content["sizes"]), "phases": phases}
        return StartEntry(**{**content, **lists})
    sources = tuple(SourceEntry(**{**entry, "ids": _ids(entry["ids"])}) for entry in content["sources"])
    counts = content["step"], content["num_samples"], int(content["digest"], 16)
    return StepEntry(*counts, sources, content.get("skipped", False))


def to_line(entry: StartEntry | StepEntry) -> bytes:
    """Returns the entry as one line of JSON, newline included."""
    values = asdict(entry)
    if isinstance(entry, StepEntry):
        sources = [{**asdict(source), "ids": ranges(source.ids)} for source in entry.sources]
        values |= {"digest": f"{entry.digest:016x}", "sources": sources}
        if not entry.skipped:
            del values["skipped"]  # false in nearly every line
    return json.dumps(values).encode() + b"\n"


def ranges(ids: tuple[int, ...]) -> str:
    """Writes ascending numbers as text, such as `3,5-7`; repeated numbers are repeated."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _ids(text: str) -> tuple[int, ...]:
    ids: list[int] = []
    for run in text.split(",") if text else []:
        first, _, last = run.partition("-")
        ids += range(int(first), int(last or first) + 1)
    return tuple(ids)


@dataclass(frozen=True)
class EpochTotals:
    """One epoch of one source over a whole run."""

    source: str
    epoch: int
    samples: int
    """Samples read, repeated ones counted again."""
    size: int | None
    """Samples in the epoch; None for an endless source."""
    tokens: int
    loss_tokens: int
    repeated: tuple[int, ...]
    lost: int
    """Samples that were not read although the next epoch has begun, beyond those in an unfinished window."""


@dataclass(frozen=True)
class PhaseTotals:
    """One blend of a curriculum as it was trained."""

    phase: DataPhase
    last_step: int
    samples: dict[str, int]


class Ledger:
    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("dp_*.jsonl"))
        if not paths:
            raise DataError(f"{folder} holds no data ledger; give the run.dir of a run with metrics.data_ledger=true")
        self.starts: dict[int, StartEntry] = {}
        """Updates completed before a start -> its entry."""
        self.steps: dict[int, list[StepEntry]] = {}
        for entry in (entry for path in paths for entry in read_file(path)):
            if isinstance(entry, StartEntry):
                self.starts[entry.start] = entry
            else:
                self.steps.setdefault(entry.step, []).append(entry)
        if not self.starts or not self.steps:
            raise DataError(f"{folder} holds no step yet; wait for the first one")

    def start_of(self, step: int) -> StartEntry:
        return self.starts[max(start for start in self.starts if start < step)]

    def step(self, step: int) -> StepEntry:
        if step not in self.steps:
            raise DataError(f"step {step} is not in the ledger, which has {min(self.steps)} to {max(self.steps)}")
        sources = _merged(part for entry in self.steps[step] for part in entry.sources)
        digest = sum(entry.digest for entry in self.steps[step]) % _DIGESTS
        first = self.steps[step][0]
        return StepEntry(step, first.num_samples, digest, sources, first.skipped)

    def incomplete_steps(self) -> dict[int, str]:
        """Returns step -> fault for steps that lack samples or have too many, up to the last step."""
        faults = {}
        for step in range(1, max(self.steps) + 1):
            if step not in self.steps:
                faults[step] = "is missing"
                continue
            count = sum(len(part.ids) for entry in self.steps[step] for part in entry.sources)
            if count != (expected := self.steps[step][0].num_samples):
                faults[step] = f"has {count} of {counted(expected, 'sample')}"
        return faults

    def skipped_steps(self) -> list[int]:
        """Returns the steps that were read without an update, ascending."""
        return sorted(step for step, entries in self.steps.items() if entries[0].skipped)

    def epochs(self) -> list[EpochTotals]:
        """Sums up every epoch of every source, in order of beginning; after a change of data, counting restarts."""
        parts: dict[tuple[int, int, int], list[SourceEntry]] = {}
        starts: dict[int, StartEntry] = {}
        began = self._first_starts()
        for step in sorted(self.steps):
            start = self.start_of(step)
            starts[began[start.start]] = start
            for part in self.step(step).sources:
                parts.setdefault((began[start.start], part.source, part.epoch), []).append(part)
        unread = self.unread_of_window()
        return [self._totals(starts[key[0]], key, entries, parts.keys(), unread) for key, entries in parts.items()]

    def _first_starts(self) -> dict[int, int]:
        """Returns start -> first start with the same data; blends or windows that neither has reached may differ."""
        first_starts: dict[int, int] = {}

        def until(start: int, one: int) -> str:
            return known_until(fingerprint_until(self.starts[one].fingerprint, start), start)

        for start in sorted(self.starts):
            data = until(start, start)
            same = [one for one in first_starts if until(start, one) == data]
            first_starts[start] = first_starts[same[-1]] if same else start
        return first_starts

    def unread_of_window(self) -> int:
        """Counts the remaining samples of the last window if windows cross the ends of epochs, else 0."""
        windows = windows_in(self.start_of(max(self.steps)).fingerprint)
        if windows is None or not windows.across_epochs:
            return 0
        total = end = 0
        for step in sorted(self.steps):
            total += self.steps[step][0].num_samples
            sizes = [windows.window, *(window for first, window in windows.later if first < step)]
            while end < total:
                end += sizes[-1]
        return end - total

    def phase_totals(self) -> list[PhaseTotals]:
        """Sums up the phases of a curriculum that the run has reached."""
        last = max(self.steps)
        phases = [phase for phase in self.start_of(last).phases if phase.from_step < last]
        ends = [*(phase.from_step for phase in phases[1:]), last]
        totals = []
        for phase, end in zip(phases, ends):
            samples: Counter[str] = Counter()
            for step in range(phase.from_step + 1, end + 1):
                for part in self.step(step).sources if step in self.steps else ():
                    samples[self.start_of(step).sources[part.source]] += len(part.ids)
            totals.append(PhaseTotals(phase, end, dict(samples)))
        return totals

    def _totals(
        self,
        start: StartEntry,
        key: tuple[int, int, int],
        parts: list[SourceEntry],
        known: Collection[tuple[int, int, int]],
        unread: int,
    ) -> EpochTotals:
        began, source, epoch = key
        counts = Counter(index for part in parts for index in part.ids)
        size = start.sizes[source]
        # data that came later begin in the middle of the order, so samples before that are not lost
        is_whole = began == min(self.starts)
        has_ended = (began, source, epoch + 1) in known
        return EpochTotals(
            source=start.sources[source],
            epoch=epoch,
            samples=counts.total(),
            size=size,
            tokens=sum(part.tokens for part in parts),
            loss_tokens=sum(part.loss_tokens for part in parts),
            repeated=tuple(sorted(index for index, count in counts.items() if count > 1)),
            lost=max(0, size - len(counts) - unread) if size is not None and is_whole and has_ended else 0,
        )
