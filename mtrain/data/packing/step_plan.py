"""Assignment of the samples of a step to rows and of rows to ranks.

Packing is layout: a step holds the same samples with and without packing. They are first put into rows, which depends
on their lengths and the width of a row alone, then rows are dealt to microbatches and data-parallel ranks. All ranks
compute the same plan from the lengths of all samples of the step, so nothing is sent.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.data.packing.balance import costs, dealt
from mtrain.data.packing.best_fit import PackedRows, packed
from mtrain.plan.layout import microbatches_come_in

FILLER: tuple[int, ...] = ()
"""Row without a sample, which makes the number of rows equal on all ranks."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Rows of one step, the same on every rank."""

    num_microbatches: int
    """Number of forward passes, the same on every rank."""
    fill: float
    """Share of positions with text in the rows that hold any; 1 for a step without samples."""
    imbalance: float
    """Work of the rank with the most over the mean of all ranks; 1 where they are equal. Where ranks wait for each
    other in every microbatch, the sum over microbatches of the most work over the mean."""
    _slots: PackedRows
    _places: NDArray[np.int64]
    """[num_microbatches, dp_size, micro_batch_size]: number of the row; -1 for a filler."""

    @property
    def num_rows(self) -> int:
        """Counts the rows with samples, over all ranks."""
        return len(self._slots.ends)

    def rows(self, microbatch: int, dp_rank: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rows of one forward pass, micro_batch_size of them: each the slots of its samples, in their order
        in the row; FILLER where a rank has fewer rows than others."""
        return tuple(
            FILLER if row < 0 else tuple(self._slots.of(row).tolist())
            for row in self._places[microbatch, dp_rank].tolist()
        )


@dataclass(frozen=True)
class StepShape:
    """Sizes of the run that a plan depends on."""

    row_width: int
    """Positions of a row."""
    micro_batch_size: int
    """Number of rows in one forward pass of one rank."""
    dp_size: int
    """Number of data-parallel ranks."""
    hidden_size: int
    """Hidden size of the model, which decides how much attention costs relative to the rest."""
    multiple_of: int = 1
    """Number that the number of microbatches is a multiple of: pp for an interleaved pipeline, else 1."""
    wait_in_microbatches: bool = False
    """Whether data-parallel ranks wait for each other in every microbatch, as where they exchange tokens between
    experts; else only at the end of a step."""

    @classmethod
    def of(cls, config: Config, dp_size: int) -> "StepShape":
        """Returns the shape that a configuration asks for."""
        return cls(
            row_width=config.row_width,
            micro_batch_size=config.train.micro_batch_size,
            dp_size=dp_size,
            hidden_size=config.model.hidden_size,
            multiple_of=microbatches_come_in(config),
            wait_in_microbatches=config.layout.ep > 1,
        )


def plan_step(lengths: NDArray[np.int64], shape: StepShape) -> StepPlan:
    """Packs the samples of one step and deals the rows.

    Rows do not depend on dp_size, micro_batch_size, hidden_size or multiple_of.

    Args:
        lengths: [num_slots] positions that the sample in each slot takes, at least 1; 0 for an empty slot, as beyond
            the end of a validation set.
        shape: Sizes of rows, ranks and microbatches.

    Raises:
        DataError: A sample is longer than a row.
    """
    _refuse_longer(lengths, shape.row_width)
    present = np.flatnonzero(lengths)
    rows = packed(lengths[present], shape.row_width)
    return plan_rows(lengths, PackedRows(present[rows.samples], rows.ends), shape)


def plan_rows(lengths: NDArray[np.int64], slots: PackedRows, shape: StepShape) -> StepPlan:
    """Deals rows that are packed already to microbatches and ranks.

    Args:
        lengths: [num_slots] positions that the sample in each slot takes.
        slots: Slots that share each row.
        shape: Sizes of rows, ranks and microbatches.
    """
    row_costs = _sums(costs(lengths, shape.hidden_size)[slots.samples], slots.ends)
    num_microbatches = num_microbatches_of(len(slots.ends), shape)
    num_turns = num_microbatches * shape.micro_batch_size
    turns = dealt(row_costs, num_turns, shape.dp_size, shape.wait_in_microbatches)
    # consecutive turns of a rank form a microbatch
    places = turns.reshape(num_microbatches, shape.micro_batch_size, shape.dp_size).transpose(0, 2, 1)
    return StepPlan(
        num_microbatches=num_microbatches,
        fill=int(lengths.sum()) / (len(slots.ends) * shape.row_width) if len(slots.ends) else 1.0,
        imbalance=_imbalance(np.append(row_costs, 0)[places].sum(axis=2), shape.wait_in_microbatches),
        _slots=slots,
        _places=places,
    )


def num_microbatches_of(num_rows: int, shape: StepShape) -> int:
    """Returns the number of microbatches of every rank for `num_rows` rows over all ranks; at least 1, as a step
    without samples is a step too."""
    a_round = shape.dp_size * shape.micro_batch_size * shape.multiple_of
    return max(1, -(-num_rows // a_round)) * shape.multiple_of


def _imbalance(work: NDArray[np.int64], wait_in_microbatches: bool) -> float:
    """Computes the imbalance of [num_microbatches, dp_size] costs."""
    if not work.any():
        return 1.0
    loads = work.sum(axis=0)
    slowest = work.max(axis=1).sum() if wait_in_microbatches else loads.max()
    return float(slowest / loads.mean())


def _sums(values: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [num_rows]: sum of the values of each row."""
    sums: NDArray[np.int64] = np.append(0, np.cumsum(values))
    of_rows: NDArray[np.int64] = np.diff(sums[np.append(0, ends)])
    return of_rows


def _refuse_longer(lengths: NDArray[np.int64], row_width: int) -> None:
    longer = np.flatnonzero(lengths > row_width)
    if longer.size:
        slot = int(longer[0])
        raise DataError(
            f"sample {slot} of the step takes {lengths[slot]} positions, but a packed row has {row_width}; shorten it, "
            "or raise train.tokens_per_micro_batch or, where that is not given, data.seq_length"
        )
