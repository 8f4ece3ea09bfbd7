"""Assigns the samples of a step to rows and the rows to ranks.

Packing is layout: a step holds the same samples with and without it. Samples are first put into rows, which depends
only on their lengths and the width of a row; then rows are dealt to microbatches and data-parallel ranks. All ranks
compute the same plan, so nothing is sent.

Ranks should do equal work; a rank computes one row in each turn. Ranks wait for each other at the end of a step, so the
sum of a rank's rows decides, with or without a pipeline. If ranks exchange tokens between experts, they wait in every
turn, and the sum over turns of the most expensive row decides. Rows sorted by cost and cut into turns minimise that
sum; within turns they are then dealt so that the sums are equal. Ranks that wait only at the end may also exchange rows
of different turns, which makes their sums more equal.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mtrain.arch.layout import microbatches_come_in
from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.data.packing.best_fit import PackedRows, packed

FILLER: tuple[int, ...] = ()
"""Row without a sample, which makes the number of rows equal on all ranks."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Rows of one step, the same on every rank."""

    num_microbatches: int
    """Number of forward passes of every rank."""
    fill: float
    """Share of positions with text in the rows that hold any; 1 for a step without samples."""
    imbalance: float
    """Largest work of a rank over the mean; if ranks wait for each other in every microbatch, the sum over microbatches
    of the largest work over the mean."""
    _slots: PackedRows
    _places: NDArray[np.int64]
    """[num_microbatches, dp_size, micro_batch_size]: number of the row; -1 for a filler."""

    @property
    def num_rows(self) -> int:
        """Counts the rows with samples, over all ranks."""
        return len(self._slots.ends)

    def rows(self, microbatch: int, dp_rank: int) -> tuple[tuple[int, ...], ...]:
        """Returns the micro_batch_size rows of one forward pass, each the slots of its samples in order; FILLER if a
        rank has fewer rows than others."""
        return tuple(
            FILLER if row < 0 else tuple(self._slots.of(row).tolist())
            for row in self._places[microbatch, dp_rank].tolist()
        )


@dataclass(frozen=True)
class StepShape:
    """Sizes that a plan depends on."""

    row_width: int
    """Positions of a row."""
    micro_batch_size: int
    """Rows in one forward pass of a rank."""
    dp_size: int
    hidden_size: int
    """Decides the cost of attention relative to the rest."""
    multiple_of: int = 1
    """Divisor of the number of microbatches: pp for an interleaved pipeline, else 1."""
    wait_in_microbatches: bool = False
    """Whether data-parallel ranks wait for each other in every microbatch, as when they exchange tokens between
    experts; else only at the end of a step."""

    @classmethod
    def of(cls, config: Config, dp_size: int) -> "StepShape":
        return cls(
            row_width=config.row_width,
            micro_batch_size=config.train.micro_batch_size,
            dp_size=dp_size,
            hidden_size=config.model.hidden_size,
            multiple_of=microbatches_come_in(config),
            wait_in_microbatches=config.layout.ep > 1,
        )


def plan_step(lengths: NDArray[np.int64], shape: StepShape) -> StepPlan:
    """Packs the samples of one step and deals the rows, which do not depend on dp_size, micro_batch_size, hidden_size
    or multiple_of.

    Args:
        lengths: [num_slots] positions of the sample in each slot, at least 1; 0 for an empty slot, as beyond the end of
            a validation set.
    """
    _refuse_longer(lengths, shape.row_width)
    present = np.flatnonzero(lengths)
    rows = packed(lengths[present], shape.row_width)
    return plan_rows(lengths, PackedRows(present[rows.samples], rows.ends), shape)


def plan_rows(lengths: NDArray[np.int64], slots: PackedRows, shape: StepShape) -> StepPlan:
    """Deals packed rows to microbatches and ranks; `lengths` are [num_slots] positions of the sample in each slot."""
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
    """Returns the microbatches of every rank for `num_rows` rows over all ranks; at least 1, even for a step without
    samples."""
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


_MAX_ROUNDS = 16
_EQUAL_ENOUGH = 1.001
"""Ratio of the largest load to the mean below which no exchange is tried."""


def costs(lengths: NDArray[np.int64], hidden_size: int) -> NDArray[np.int64]:
    """Estimates the cost of samples: 6 * hidden_size * length + length^2.

    The first term is for products with weights, the second for attention within the sample: 24 hidden_size^2 and 4
    hidden_size x length multiply-adds a token and layer, for an FFN of four times the hidden size. Whole numbers, so
    that all machines deal alike.
    """
    wide = lengths.astype(np.int64)
    return wide * (6 * hidden_size + wide)


def dealt(row_costs: NDArray[np.int64], num_turns: int, dp_size: int, wait_in_turns: bool) -> NDArray[np.int64]:
    """Deals rows to ranks; the same on every machine.

    Args:
        row_costs: [num_rows] cost of each row; num_rows <= num_turns x dp_size.
        wait_in_turns: Whether ranks wait for each other in every turn, or only at the end.

    Returns:
        [num_turns, dp_size]: the row that each rank computes in each turn, -1 for none.
    """
    dearest_first = np.argsort(-row_costs, kind="stable")
    missing = num_turns * dp_size - len(row_costs)
    turns = np.pad(dearest_first, (0, missing), constant_values=-1).reshape(num_turns, dp_size)
    # -1 takes the 0 at the end
    with_none = np.append(row_costs, 0)
    turns = np.take_along_axis(turns, np.argsort(_ranks_of_equal_load(with_none[turns]), axis=1), axis=1)
    if not wait_in_turns:
        _exchange(turns, with_none)
        turns = np.take_along_axis(turns, np.argsort(-with_none[turns], axis=0, kind="stable"), axis=0)
    return turns[_cheap_at_both_ends(num_turns)]


def _ranks_of_equal_load(turn_costs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Deals the rows of each turn so that loads are equal.

    Args:
        turn_costs: [num_turns, dp_size] costs, decreasing within a turn.

    Returns:
        [num_turns, dp_size]: a permutation of the ranks for each turn.
    """
    ranks = np.empty(turn_costs.shape, np.int64)
    loads = np.zeros(turn_costs.shape[1], np.int64)
    for turn, each in enumerate(turn_costs):
        ranks[turn] = _deal(loads, each)
    # once all are dealt, a turn that is taken back and dealt again makes the spread smaller or leaves it
    for _ in range(_MAX_ROUNDS):
        before = loads.copy()
        for turn, each in enumerate(turn_costs):
            loads[ranks[turn]] -= each
            ranks[turn] = _deal(loads, each)
        if np.array_equal(loads, before):
            break
    return ranks


def _deal(loads: NDArray[np.int64], descending: NDArray[np.int64]) -> NDArray[np.int64]:
    """Gives the most expensive row to the least loaded rank, and so on; adds to `loads`."""
    ranks = np.argsort(loads, kind="stable")
    loads[ranks] += descending
    return ranks


def _exchange(turns: NDArray[np.int64], row_costs: NDArray[np.int64]) -> None:
    """Exchanges rows between the most and least loaded ranks while that brings them closer; changes `turns`,
    [num_turns, dp_size], in place."""
    loads = row_costs[turns].sum(axis=0)
    # every exchange brings two loads closer, so it ends; the bound is for very many ranks
    for _ in range(4 * turns.shape[1]):
        most, least = int(loads.argmax()), int(loads.argmin())
        gap = int(loads[most] - loads[least])
        if loads[most] <= _EQUAL_ENOUGH * loads.mean():
            return
        differences = row_costs[turns[:, most]][:, None] - row_costs[turns[:, least]][None, :]
        # half the gap would make both equal
        given, taken = np.unravel_index(np.abs(2 * differences - gap).argmin(), differences.shape)
        difference = int(differences[given, taken])
        if not 0 < difference < gap:
            return
        turns[given, most], turns[taken, least] = turns[taken, least], turns[given, most]
        loads[most] -= difference
        loads[least] += difference


def _cheap_at_both_ends(num_turns: int) -> NDArray[np.int64]:
    """Orders turns, which are sorted from the most expensive: ..., 3, 1, 0, 2, 4, ...

    A pipeline fills with its first microbatch and drains with its last one while other stages wait; in between a stage
    waits for the difference between consecutive microbatches.
    """
    dearest_first = np.arange(num_turns)
    return np.concatenate([dearest_first[1::2][::-1], dearest_first[0::2]])
