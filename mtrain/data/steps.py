"""Decides which samples of the run's order each step holds.

A step that counts sequences holds the next global_batch_size of them. One that counts packed rows (`data.packing.batch:
rows`) holds the next global_batch_size rows of windows of the order. Either is a pure function of the configuration,
the lengths of the samples and the step.

Blends may replace each other at given steps (`data.curriculum`). Steps hold equally many samples then, so a blend
begins at a fixed sample of the order. The fingerprint names these steps, so that two can be compared up to a step:
later phases may change under a run, trained ones may not.

The order of samples is cut into windows of equally many samples; the number may change at given steps, and a window
ends where a source begins a new epoch, so that epochs follow each other however long a window is. Each window is packed
separately and its rows are shuffled. The rows of the run are the rows of all windows one after the other, and step k
holds rows k x num_rows to (k + 1) x num_rows. All of it follows from the seed and the lengths of samples, on any number
of ranks.
"""

import bisect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.config.schema.data import FilesSection
from mtrain.core.batch.order import BlendPhase, SamplePosition, key_of, permutation
from mtrain.core.batch.sample import Sample
from mtrain.data.packing.step_plan import PackedRows, packed

Widths = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""[n]: positions that each of [n] samples of the order takes, at least 1."""
NextEpoch = Callable[[int], int | None]
"""Number of a sample -> number of the first later sample that must not be in the same window, or None."""

_ROW_ORDER = 2
"""Part of the key that separates the permutation of rows from those of samples and documents, of the same seed."""
_WINDOWS_KEPT = 4


class SampleStream(Protocol):
    """The endless sequence of training samples."""

    fingerprint: str
    """Changes when the data or their order change, for the same seed."""

    earlier_fingerprints: tuple[str, ...]
    """Fingerprints that earlier versions gave the same samples in the same order."""

    def sample(self, g: int) -> Sample:
        """Returns sample g of the run, counted from 0."""

    def widths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [n]: positions that each of [n] samples takes in a row."""

    def locate(self, g: int) -> SamplePosition: ...

    def next_epoch(self, g: int) -> int | None:
        """Returns the first sample after g whose source has finished its epoch at g; None for endless sources."""

    @property
    def named_sizes(self) -> tuple[tuple[str, int | None], ...]:
        """Lists (name, samples in an epoch) of each source; None for an endless source."""


class Windows(NamedTuple):
    """Sizes that decide the steps of packed rows, apart from the samples."""

    num_rows: int
    """Rows in a step, over all ranks."""
    row_width: int
    window: int
    """Samples that are packed together."""
    later: tuple[tuple[int, int], ...] = ()
    """(updates completed, window): size of the windows that begin in this step or later; ascending."""
    across_epochs: bool = False
    """Whether a window may hold several epochs of a source."""

    def until(self, step: int) -> "Windows":
        """Returns the windows without those that begin after the first `step` updates."""
        return self._replace(later=tuple(change for change in self.later if change[0] < step))

    def window_from(self, row: int) -> int:
        """Returns the number of samples in the window whose first row has this number in the run."""
        sizes = [window for step, window in self.later if step <= row // self.num_rows]
        return sizes[-1] if sizes else self.window


@dataclass(frozen=True, eq=False)
class StepSamples:
    numbers: NDArray[np.int64]
    """[num_slots]: the sample in each slot, counted from 0 over the run."""
    rows: PackedRows | None = None
    """Slots that share a row, if packing decided which samples the step holds; None if rows are free."""


class StepsOfRows:
    """Steps of a fixed number of packed rows each: the endless sequence of rows, cut into steps."""

    def __init__(
        self, widths: Widths, windows: Windows, seed: int, next_epoch: NextEpoch = lambda number: None
    ) -> None:
        self._widths, self._windows, self._seed, self._next_epoch = widths, windows, seed, next_epoch
        self.fingerprint = shown(windows)
        self._ends = [0]
        """Total rows before each window, and before the next window."""
        self._starts = [0]
        """First sample of each window, and of the next window."""
        # the thread that reads ahead and a caller may both ask for a new window
        self._growing = Lock()
        self._rows = lru_cache(_WINDOWS_KEPT)(self._packed)

    def samples(self, step: int) -> StepSamples:
        """Returns the samples of the step after `step` updates.

        The first call packs all windows before the step, whose numbers of rows are not known otherwise.
        """
        first, stop = step * self._windows.num_rows, (step + 1) * self._windows.num_rows
        with self._growing:
            while self._ends[-1] < stop:
                self._add_window()
        parts: list[NDArray[np.int64]] = []
        window = bisect.bisect_right(self._ends, first) - 1
        while first < stop:
            before, end = self._ends[window : window + 2]
            rows, until = self._rows(window), min(stop, end)
            parts += [rows.of(number) for number in range(first - before, until - before)]
            first, window = until, window + 1
        numbers = np.concatenate(parts)
        return StepSamples(numbers, PackedRows(np.arange(len(numbers)), np.cumsum([len(part) for part in parts])))

    def holding(self, num_samples: int) -> int:
        """Returns the fewest steps that hold `num_samples`."""
        with self._growing:
            while self._starts[-1] < num_samples:
                self._add_window()
        last = bisect.bisect_left(self._starts, num_samples) - 1
        row = int(np.searchsorted(self._rows(last).ends, num_samples - self._starts[last]))
        return -(-(self._ends[last] + row + 1) // self._windows.num_rows)

    def _add_window(self) -> None:
        window, rows, start = len(self._ends) - 1, self._ends[-1], self._starts[-1]
        end, edge = start + self._windows.window_from(rows), self._next_epoch(start)
        self._starts.append(end if edge is None else min(end, edge))
        self._ends.append(rows + len(self._rows(window).ends))

    def _packed(self, window: int) -> PackedRows:
        """Packs one window and shuffles its rows: best-fit-decreasing leaves the rows of long samples at the front."""
        start, end = self._starts[window : window + 2]
        rows = packed(self._widths(np.arange(start, end)), self._windows.row_width)
        order = permutation(len(rows.ends), key_of(self._seed, _ROW_ORDER, window))
        parts = [rows.of(number) for number in order.tolist()]
        return PackedRows(np.concatenate(parts) + start, np.cumsum([len(part) for part in parts]))


@dataclass(frozen=True)
class StepsOfSequences:
    size: int
    fingerprint: str = ""

    def samples(self, step: int) -> StepSamples:
        return StepSamples(np.arange(step * self.size, (step + 1) * self.size))

    def holding(self, num_samples: int) -> int:
        return -(-num_samples // self.size)


Steps: TypeAlias = StepsOfSequences | StepsOfRows
"""The order of samples, cut into steps; `fingerprint` identifies the rule, apart from train.global_batch_size."""


def steps_of(config: Config, order: SampleStream) -> Steps:
    """Returns the steps as the configuration counts them: by sequences or by packed rows."""
    packing, size = config.data.packing, config.sequences_per_step
    if packing is None or not config.steps_count_rows:
        return StepsOfSequences(size)
    later = tuple((change.from_step, change.window) for change in packing.later)
    windows = Windows(size, config.row_width, packing.window, later, packing.across_epochs)
    if packing.across_epochs:
        return StepsOfRows(order.widths, windows, config.order_seed)
    return StepsOfRows(order.widths, windows, config.order_seed, order.next_epoch)


_APART = ", each in one epoch"
_WINDOWS = re.compile(
    r" \((\d+) rows of (\d+) a step, from windows of (\d+)((?:, of \d+ from \d+ updates on)*)"
    rf"({_APART})?\)$",
    re.ASCII,
)
_LATER = re.compile(r"of (\d+) from (\d+) updates on", re.ASCII)


def windows_in(fingerprint: str) -> Windows | None:
    """Reads the windows from the fingerprint of a run's data; None if its steps count sequences."""
    match = _WINDOWS.search(fingerprint)
    if match is None:
        return None
    later = tuple((int(step), int(window)) for window, step in _LATER.findall(match[4]))
    return Windows(int(match[1]), int(match[2]), int(match[3]), later, across_epochs=match[5] is None)


def known_until(fingerprint: str, step: int) -> str:
    """Cuts a fingerprint to what decides the samples up to `step` updates: without windows that begin after them."""
    windows = windows_in(fingerprint)
    return fingerprint if windows is None else _WINDOWS.sub("", fingerprint) + shown(windows.until(step))


def shown(windows: Windows) -> str:
    """Writes the windows in words, for fingerprints and messages."""
    later = "".join(f", of {window} from {counted(step, 'update')} on" for step, window in windows.later)
    apart = "" if windows.across_epochs else _APART
    return (
        f" ({counted(windows.num_rows, 'row')} of {windows.row_width} a step, from windows of "
        f"{windows.window}{later}{apart})"
    )


_FROM = " from step {}: "
_EDGE = re.compile(r" from step (\d+): ")


def later_blends(data: FilesSection, global_batch_size: int) -> dict[int, BlendPhase]:
    """Returns updates completed before it begins -> blend of `data.curriculum`, ascending."""
    numbers = {source.path: number for number, source in enumerate(data.all_sources)}
    blends = {}
    for blend in data.curriculum:
        sources = tuple(numbers[blend_source.path] for blend_source in blend.sources)
        weights = tuple(blend_source.weight for blend_source in blend.sources)
        blends[blend.from_step] = BlendPhase(blend.from_step * global_batch_size, sources, weights)
    return blends


def with_later(fingerprint: str, later: Mapping[int, BlendPhase], of_sources: Sequence[str]) -> str:
    """Builds the fingerprint of all data of a run."""
    for step, phase in later.items():
        # with numbers: two sources with the same content may be at different positions in their epochs
        shares = zip(phase.weights, phase.sources)
        parts = "+".join(f"{weight:g}*{number}:{of_sources[number]}" for weight, number in shares)
        fingerprint += _FROM.format(step) + parts
    return fingerprint


def has_phases(fingerprint: str) -> bool:
    """Says whether a fingerprint has more than one blend."""
    return _EDGE.search(fingerprint) is not None


def fingerprint_until(fingerprint: str, step: int) -> str:
    """Cuts a fingerprint down to what decides the samples of the first `step` steps."""
    edge = next((edge for edge in _EDGE.finditer(fingerprint) if int(edge[1]) >= step), None)
    return fingerprint if edge is None else fingerprint[: edge.start()]
