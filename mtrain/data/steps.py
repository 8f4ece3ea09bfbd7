"""The samples of the run's order that each step holds.

A step that counts sequences holds the next global_batch_size of them. One that counts packed rows (`data.packing.batch:
rows`) holds the next global_batch_size rows of windows of the order. Either is a pure function of the configuration,
the lengths of the samples and the step.

The order of samples is cut into windows of equally many samples; the number may change at given steps, and a window
ends where a source begins a new epoch, so that epochs follow each other however long a window is. Each window is packed
separately and its rows are shuffled. The rows of the run are the rows of all windows one after the other, and step k
holds rows k x num_rows to (k + 1) x num_rows. All of it follows from the seed and the lengths of samples, on any number
of ranks.
"""

import bisect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mtrain.config import Config
from mtrain.core.batch.order import key_of, permutation
from mtrain.data.packing.best_fit import PackedRows, packed

Widths = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""[n]: positions that each of [n] samples of the order takes, at least 1."""
NextEpoch = Callable[[int], int | None]
"""Number of a sample -> number of the first later one that no window may hold with it; None if there is none."""

_ROW_ORDER = 2
"""Part of the key that separates the permutation of rows from those of samples and documents, which have the same
seed."""
_WINDOWS_KEPT = 4


@dataclass(frozen=True)
class WindowShape:
    """Sizes that decide which samples a step holds."""

    window: int
    """Samples that are packed together."""
    row_width: int
    """Positions of a row."""
    num_rows: int
    """Rows in a step, over all ranks."""
    seed: int
    later: tuple[tuple[int, int], ...] = ()
    """(updates completed, window): size of the windows that begin in this step or later; ascending."""

    def window_from(self, row: int) -> int:
        """Returns the number of samples in the window whose first row has this number in the run."""
        sizes = [window for step, window in self.later if step <= row // self.num_rows]
        return sizes[-1] if sizes else self.window


class WindowedRows:
    """The endless sequence of rows, cut into steps."""

    def __init__(self, widths: Widths, shape: WindowShape, next_epoch: NextEpoch = lambda number: None) -> None:
        self._widths, self._shape, self._next_epoch = widths, shape, next_epoch
        self._ends: list[int] = []
        """Total rows up to the end of each window."""
        self._starts = [0]
        """First sample of each window, and of the next window."""
        # the thread that reads ahead and a caller may both be the first to ask for a window
        self._growing = Lock()
        self._rows = lru_cache(_WINDOWS_KEPT)(self._packed)

    def step(self, step: int) -> PackedRows:
        """Returns the rows of the step after `step` updates; `samples` are numbers of the order.

        The first call packs all windows before the step, whose numbers of rows are not known otherwise.
        """
        first, stop = step * self._shape.num_rows, (step + 1) * self._shape.num_rows
        self._count_rows(stop)
        parts: list[NDArray[np.int64]] = []
        window = bisect.bisect_right(self._ends, first)
        while first < stop:
            before = self._ends[window - 1] if window else 0
            rows, until = self._rows(window), min(stop, self._ends[window])
            parts += [rows.of(number) for number in range(first - before, until - before)]
            first, window = until, window + 1
        return PackedRows(np.concatenate(parts), np.cumsum([len(part) for part in parts]))

    def holding(self, num_samples: int) -> int:
        """Returns the fewest steps that hold `num_samples`."""
        with self._growing:
            while self._starts[-1] < num_samples:
                self._add_window()
        last = bisect.bisect_left(self._starts, num_samples) - 1
        held = int(np.searchsorted(self._rows(last).ends, num_samples - self._starts[last]))
        before = self._ends[last - 1] if last else 0
        return -(-(before + held + 1) // self._shape.num_rows)

    def _count_rows(self, needed: int) -> None:
        with self._growing:
            while (self._ends[-1] if self._ends else 0) < needed:
                self._add_window()

    def _add_window(self) -> None:
        rows, start = self._ends[-1] if self._ends else 0, self._starts[-1]
        end, edge = start + self._shape.window_from(rows), self._next_epoch(start)
        self._starts.append(end if edge is None else min(end, edge))
        self._ends.append(rows + len(self._rows(len(self._ends)).ends))

    def _packed(self, window: int) -> PackedRows:
        """Packs one window and shuffles its rows: best-fit-decreasing leaves the rows of long samples at the front."""
        start, end = self._starts[window : window + 2]
        rows = packed(self._widths(np.arange(start, end)), self._shape.row_width)
        order = permutation(len(rows.ends), key_of(self._shape.seed, _ROW_ORDER, window))
        parts = [rows.of(number) for number in order.tolist()]
        return PackedRows(np.concatenate(parts) + start, np.cumsum([len(part) for part in parts]))


@dataclass(frozen=True, eq=False)
class StepSamples:
    numbers: NDArray[np.int64]
    """[num_slots]: the sample in each slot, counted from 0 over the run."""
    rows: PackedRows | None = None
    """Slots that share a row, if packing decided which samples the step holds; None if rows are free."""


class Steps(Protocol):
    """The order of samples, cut into steps."""

    @property
    def fingerprint(self) -> str:
        """Identifies the rule that decides which samples a step holds, apart from the samples and
        train.global_batch_size."""

    def samples(self, step: int) -> StepSamples:
        """Returns the samples of the step after `step` updates."""

    def holding(self, num_samples: int) -> int:
        """Returns the fewest steps that hold `num_samples`."""


class SizedOrder(Protocol):
    """An order of samples, as far as steps depend on it."""

    def widths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [n]: positions that each of [n] samples takes in a row."""

    def next_epoch(self, g: int) -> int | None:
        """Returns the first sample after g that no window may hold with it; None if there is none."""


def steps_of(config: Config, order: SizedOrder) -> Steps:
    """Returns the steps as the configuration counts them: by sequences or by packed rows."""
    packing, size = config.data.packing, config.sequences_per_step
    if packing is None or not config.steps_count_rows:
        return StepsOfSequences(size)
    later = tuple((each.from_step, each.window) for each in packing.later)
    shape = WindowShape(packing.window, config.row_width, size, config.order_seed, later)
    return StepsOfRows(order.widths, shape, None if packing.across_epochs else order.next_epoch)


@dataclass(frozen=True)
class StepsOfSequences:
    """Steps of `size` samples each."""

    size: int
    fingerprint: str = ""

    def samples(self, step: int) -> StepSamples:
        return StepSamples(np.arange(step * self.size, (step + 1) * self.size))

    def holding(self, num_samples: int) -> int:
        return -(-num_samples // self.size)


class Windows(NamedTuple):
    """Sizes that decide the steps of packed rows, apart from the samples."""

    num_rows: int
    """Rows in a step."""
    row_width: int
    window: int
    """Samples that are packed together."""
    later: tuple[tuple[int, int], ...]
    """Pairs (updates completed, window) at which other windows begin."""
    across_epochs: bool = False
    """Whether a window may hold several epochs of a source."""

    def until(self, step: int) -> "Windows":
        """Returns the windows without those that begin after the first `step` updates."""
        return self._replace(later=tuple(each for each in self.later if each[0] < step))


_APART = ", each in one epoch"
_WINDOWS = re.compile(
    r" \((\d+) rows of (\d+) a step, from windows of (\d+)((?:, of \d+ from \d+ updates on)*)"
    rf"({_APART})?\)$",
    re.ASCII,
)
_LATER = re.compile(r"of (\d+) from (\d+) updates on", re.ASCII)


def windows_in(fingerprint: str) -> Windows | None:
    """Reads the windows from the fingerprint of a run's data; None if its steps count sequences."""
    found = _WINDOWS.search(fingerprint)
    if found is None:
        return None
    later = tuple((int(step), int(window)) for window, step in _LATER.findall(found[4]))
    return Windows(int(found[1]), int(found[2]), int(found[3]), later, across_epochs=found[5] is None)


def known_until(fingerprint: str, step: int) -> str:
    """Cuts a fingerprint down to what decides the samples up to `step` updates: without windows that begin after
    them."""
    windows = windows_in(fingerprint)
    return fingerprint if windows is None else _WINDOWS.sub("", fingerprint) + shown(windows.until(step))


def shown(windows: Windows) -> str:
    """Writes the windows in words, for fingerprints and messages."""
    later = "".join(f", of {window} from {step} updates on" for step, window in windows.later)
    apart = "" if windows.across_epochs else _APART
    return f" ({windows.num_rows} rows of {windows.row_width} a step, from windows of {windows.window}{later}{apart})"


class StepsOfRows:
    """Steps of a fixed number of packed rows each."""

    def __init__(self, widths: Widths, shape: WindowShape, next_epoch: NextEpoch | None) -> None:
        self._windows = WindowedRows(widths, shape, next_epoch or (lambda number: None))
        across = next_epoch is None
        self.fingerprint = shown(Windows(shape.num_rows, shape.row_width, shape.window, shape.later, across))

    def samples(self, step: int) -> StepSamples:
        rows = self._windows.step(step)
        return StepSamples(rows.samples, PackedRows(np.arange(len(rows.samples)), rows.ends))

    def holding(self, num_samples: int) -> int:
        return self._windows.holding(num_samples)
