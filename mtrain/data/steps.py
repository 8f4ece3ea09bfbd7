"""The samples of the run's order that each step holds.

A step that counts sequences holds the next global_batch_size of them. One that counts packed rows
(`data.packing.batch: rows`) holds the next global_batch_size rows of windows of the order. Either is a pure function of
the configuration, the lengths of the samples and the step.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mtrain.config import Config
from mtrain.data.packing.best_fit import PackedRows
from mtrain.data.packing.windows import Widths, WindowedRows, WindowShape


@dataclass(frozen=True, eq=False)
class StepSamples:
    """The samples of a step."""

    numbers: NDArray[np.int64]
    """[num_slots]: the sample in each slot, counted from 0 over the run."""
    rows: PackedRows | None = None
    """Slots that share a row, where packing decided which samples the step holds; None where rows are free."""


class Steps(Protocol):
    """The order of samples, cut into steps."""

    @property
    def fingerprint(self) -> str:
        """Identifies the rule that decides which samples a step holds, apart from the samples and
        train.global_batch_size."""

    def samples(self, step: int) -> StepSamples:
        """Returns the samples of the step after `step` completed updates."""


def steps_of(config: Config, widths: Widths) -> Steps:
    """Returns the steps as the configuration counts them: by sequences or by packed rows.

    Args:
        config: Configuration of the run.
        widths: Function that gives the positions that samples of the order take in a row.
    """
    packing, size = config.data.packing, config.sequences_per_step
    if packing is None or not config.steps_count_rows:
        return StepsOfSequences(size)
    later = tuple((each.from_step, each.window) for each in packing.later)
    return StepsOfRows(widths, WindowShape(packing.window, config.row_width, size, config.train.seed, later))


@dataclass(frozen=True)
class StepsOfSequences:
    """Steps of `size` samples each."""

    size: int
    fingerprint: str = ""

    def samples(self, step: int) -> StepSamples:
        """Returns the samples of the step after `step` completed updates."""
        return StepSamples(np.arange(step * self.size, (step + 1) * self.size))


class Windows(NamedTuple):
    """Sizes that decide the steps of packed rows, apart from the samples."""

    num_rows: int
    """Number of rows in a step."""
    row_width: int
    window: int
    """Number of samples that are packed together."""
    later: tuple[tuple[int, int], ...]
    """Pairs (updates completed, window) at which other windows begin."""

    def until(self, step: int) -> "Windows":
        """Returns the windows without those that begin after the first `step` updates."""
        return self._replace(later=tuple(each for each in self.later if each[0] < step))


_WINDOWS = re.compile(
    r" \((\d+) rows of (\d+) a step, from windows of (\d+)((?:, of \d+ from \d+ updates on)*)\)$", re.ASCII
)
_LATER = re.compile(r"of (\d+) from (\d+) updates on", re.ASCII)


def windows_in(fingerprint: str) -> Windows | None:
    """Reads the windows out of the fingerprint of a run's data; None where its steps count sequences."""
    found = _WINDOWS.search(fingerprint)
    if found is None:
        return None
    later = tuple((int(step), int(window)) for window, step in _LATER.findall(found[4]))
    return Windows(int(found[1]), int(found[2]), int(found[3]), later)


def known_until(fingerprint: str, step: int) -> str:
    """Cuts a fingerprint down to what decides the samples up to `step` updates: without windows that begin after
    them."""
    windows = windows_in(fingerprint)
    return fingerprint if windows is None else _WINDOWS.sub("", fingerprint) + shown(windows.until(step))


def shown(windows: Windows) -> str:
    """Writes the windows in words: fingerprints and messages contain them."""
    later = "".join(f", of {window} from {step} updates on" for step, window in windows.later)
    return f" ({windows.num_rows} rows of {windows.row_width} a step, from windows of {windows.window}{later})"


class StepsOfRows:
    """Steps of a fixed number of packed rows each."""

    def __init__(self, widths: Widths, shape: WindowShape) -> None:
        self._windows = WindowedRows(widths, shape)
        self.fingerprint = shown(Windows(shape.num_rows, shape.row_width, shape.window, shape.later))

    def samples(self, step: int) -> StepSamples:
        """Returns the samples of the step after `step` completed updates, with their rows."""
        rows = self._windows.step(step)
        return StepSamples(rows.samples, PackedRows(np.arange(len(rows.samples)), rows.ends))
