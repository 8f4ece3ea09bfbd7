"""Which samples of the run's order each step holds.

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
    """The slots that share a row, where that decided which samples the step holds; else it is free."""


class Steps(Protocol):
    """The order of samples, cut into steps."""

    @property
    def fingerprint(self) -> str:
        """What decides which samples a step holds, beside the samples and train.global_batch_size of them."""

    def samples(self, step: int) -> StepSamples:
        """Of the step after `step` completed updates."""


def steps_of(config: Config, widths: Widths) -> Steps:
    """As a configuration asks for them.

    Args:
        config: Of the run.
        widths: Positions that samples of the order take in a row.
    """
    packing, size = config.data.packing, config.sequences_per_step
    if packing is None or not config.steps_count_rows:
        return StepsOfSequences(size)
    return StepsOfRows(widths, WindowShape(packing.window, config.row_width, size, config.train.seed))


@dataclass(frozen=True)
class StepsOfSequences:
    """So many samples a step."""

    size: int
    fingerprint: str = ""

    def samples(self, step: int) -> StepSamples:
        """As of `Steps`."""
        return StepSamples(np.arange(step * self.size, (step + 1) * self.size))


class Windows(NamedTuple):
    """What decides the steps of rows, beside the samples."""

    num_rows: int
    """Of a step."""
    row_width: int
    window: int
    """Samples that are packed together."""


_WINDOWS = re.compile(r" \((\d+) rows of (\d+) a step, from windows of (\d+)\)$")


def windows_in(fingerprint: str) -> Windows | None:
    """Those of a run's data; None where its steps count sequences."""
    found = _WINDOWS.search(fingerprint)
    return None if found is None else Windows(*map(int, found.groups()))


class StepsOfRows:
    """So many packed rows a step."""

    def __init__(self, widths: Widths, shape: WindowShape) -> None:
        self._windows = WindowedRows(widths, shape)
        # in words: a message shows it where a run goes on with another window
        self.fingerprint = f" ({shape.num_rows} rows of {shape.row_width} a step, from windows of {shape.window})"

    def samples(self, step: int) -> StepSamples:
        """As of `Steps`."""
        rows = self._windows.step(step)
        return StepSamples(rows.samples, PackedRows(np.arange(len(rows.samples)), rows.ends))
