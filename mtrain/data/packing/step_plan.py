"""Assigns the samples of a step to rows and the rows to ranks.

Packing is layout: a step has the same samples with and without it. Samples are first put into rows, which depends only
on their lengths and the width of a row; then rows are dealt to microbatches and data-parallel ranks. All ranks compute
the same plan, so nothing is sent.

Rows come from best-fit-decreasing: the longest sample first, each into the fullest row with room for it, the last
changed of equally full ones. Samples of equal length and rows of equal content are handled together, so the cost
depends on the number of different lengths, not of samples.

Ranks should do equal work; a rank computes one row in each turn. Ranks wait for each other at the end of a step, so its
duration follows from the largest sum of a rank's rows, with or without a pipeline. If ranks exchange tokens between
experts, they wait in every turn, and it follows from the sum over turns of the most expensive row. Rows sorted by cost
and cut into turns minimise that sum; within turns they are then dealt so that the sums are equal. Ranks that wait only
at the end may also exchange rows of different turns, which makes their sums more equal.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtrain.arch.layout import microbatches_come_in
from mtrain.base.errors import DataError
from mtrain.config import Config


class PackedRows(NamedTuple):
    samples: NDArray[np.int64]
    """[num_samples]: row after row, each with its longest sample first."""
    ends: NDArray[np.int64]
    """[num_rows]: end of each row in `samples`."""

    def of(self, row: int) -> NDArray[np.int64]:
        return self.samples[int(self.ends[row - 1]) if row else 0 : int(self.ends[row])]


_Group = tuple[tuple[int, ...], int]
"""Rows of equal content: (length, number of samples of that length, next smaller length, ...) and the number of rows.
Plain tuples, which the garbage collector does not follow; with other types it would take a third of the time."""


def packed(lengths: NDArray[np.int64], row_width: int) -> PackedRows:
    """Puts samples into as few rows as best-fit-decreasing finds; the same on every machine.

    Args:
        lengths: [num_samples] positions that each takes, 1 to row_width.
    """
    assert lengths.max(initial=0) <= row_width, "the caller refuses a sample that is longer than a row"
    counts = np.bincount(lengths, minlength=row_width + 1)
    return _filled(_groups(counts, row_width), counts, _longest_first(lengths))


def _groups(counts: NDArray[np.int64], row_width: int) -> list[_Group]:
    """Finds which lengths share a row; `counts` is [row_width + 1] samples of each length."""
    # number of free positions -> rows with that many; `spaces` has these numbers, ascending
    waiting: dict[int, list[_Group]] = {}
    spaces: list[int] = []
    full: list[_Group] = []
    empty: tuple[int, ...] = ()
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            at = bisect_left(spaces, length)
            is_new = at == len(spaces)
            if is_new:
                # a new row for every remaining sample, unless several share one
                space, content, num_rows = row_width, empty, left
            else:
                space = spaces[at]
                content, num_rows = waiting[space].pop()
            # the fullest row that has room for a sample also gets the next ones, until it is too full
            repeats = min(space // length, left)
            used = min(num_rows, left // repeats)
            left -= used * repeats
            if used < num_rows and not is_new:
                waiting[space].append((content, num_rows - used))
            elif not is_new and not waiting[space]:
                del waiting[space], spaces[at]
            group = ((*content, length, repeats), used)
            space -= length * repeats
            if space == 0:
                full.append(group)
            elif space in waiting:
                waiting[space].append(group)
            else:
                waiting[space] = [group]
                insort(spaces, space)
    return full + [group for space in spaces for group in waiting[space]]


def _longest_first(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [num_samples]: samples by decreasing length, equally long ones in order."""
    # numpy sorts 16-bit numbers by radix, in linear time
    descending = (lengths.max(initial=0) - lengths).astype(np.uint32)
    order = np.argsort((descending & 0xFFFF).astype(np.uint16), kind="stable")
    if lengths.max(initial=0) >> 16:
        order = order[np.argsort((descending >> 16).astype(np.uint16)[order], kind="stable")]
    return order


def _filled(groups: list[_Group], counts: NDArray[np.int64], longest_first: NDArray[np.int64]) -> PackedRows:
    # index in `longest_first` of the next sample of each length
    following = (len(longest_first) - np.cumsum(counts)).tolist()
    row_sizes = [sum(content[1::2]) for content, _ in groups]
    ends = np.cumsum(np.repeat(np.array(row_sizes, np.int64), [num_rows for _, num_rows in groups]))
    samples = np.empty(len(longest_first), np.int64)
    start = 0
    for (content, num_rows), row_size in zip(groups, row_sizes):
        stop = start + num_rows * row_size
        block = samples[start:stop].reshape(num_rows, row_size)
        column = 0
        for length, repeats in zip(content[::2], content[1::2]):
            first = following[length]
            following[length] = first + num_rows * repeats
            chosen = longest_first[first : following[length]]
            block[:, column : column + repeats] = chosen if num_rows == 1 else chosen.reshape(num_rows, repeats)
            column += repeats
        start = stop
    return PackedRows(samples, ends)


FILLER: tuple[int, ...] = ()
"""Row without a sample, which makes the number of rows equal on all ranks."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Rows of one step, the same on every rank."""

    num_microbatches: int
    _slots: PackedRows
    _row_numbers: NDArray[np.int64]
    """[num_microbatches, dp_size, micro_batch_size]: number of the row; -1 for a filler."""

    def rows(self, microbatch: int, dp_rank: int) -> tuple[tuple[int, ...], ...]:
        """Returns the micro_batch_size rows of one forward pass, each the slots of its samples in order; FILLER if a
        rank has fewer rows than others."""
        return tuple(
            FILLER if row < 0 else tuple(self._slots.of(row).tolist())
            for row in self._row_numbers[microbatch, dp_rank].tolist()
        )


@dataclass(frozen=True)
class StepShape:
    """Sizes that a plan depends on."""

    row_width: int
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
    row_numbers = turns.reshape(num_microbatches, shape.micro_batch_size, shape.dp_size).transpose(0, 2, 1)
    return StepPlan(num_microbatches, slots, row_numbers)


def num_microbatches_of(num_rows: int, shape: StepShape) -> int:
    """Returns the number of microbatches of each rank for `num_rows` rows over all ranks; at least 1, even for a step
    without samples."""
    a_round = shape.dp_size * shape.micro_batch_size * shape.multiple_of
    return max(1, -(-num_rows // a_round)) * shape.multiple_of


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
            "or raise train.tokens_per_micro_batch or, if that is not set, data.seq_length"
        )


_MAX_ROUNDS = 16
_EQUAL_ENOUGH = 1.001
"""Ratio of the largest load to the mean below which no exchange is tried."""


def costs(lengths: NDArray[np.int64], hidden_size: int) -> NDArray[np.int64]:
    """Estimates the cost of samples: 6 * hidden_size * length + length^2.

    The first term is for products with weights, the second for attention within the sample: 24 hidden_size^2 and 4
    hidden_size x length multiply-adds a token and layer, for an FFN of four times the hidden size. Integers, so that
    all machines compute the same plan.
    """
    wide = lengths.astype(np.int64)
    return wide * (6 * hidden_size + wide)


def dealt(row_costs: NDArray[np.int64], num_turns: int, dp_size: int, wait_in_turns: bool) -> NDArray[np.int64]:
    """Deals rows to ranks, the same on every machine: the row of each rank in each turn, [num_turns, dp_size], or -1.

    Args:
        row_costs: [num_rows] cost of each row; num_rows <= num_turns x dp_size.
        wait_in_turns: Whether ranks wait for each other in every turn, or only at the end.
    """
    dearest_first = np.argsort(-row_costs, kind="stable")
    missing = num_turns * dp_size - len(row_costs)
    turns = np.pad(dearest_first, (0, missing), constant_values=-1).reshape(num_turns, dp_size)
    # index -1 selects the 0 at the end
    with_none = np.append(row_costs, 0)
    turns = np.take_along_axis(turns, np.argsort(_ranks_of_equal_load(with_none[turns]), axis=1), axis=1)
    if not wait_in_turns:
        _exchange(turns, with_none)
        turns = np.take_along_axis(turns, np.argsort(-with_none[turns], axis=0, kind="stable"), axis=0)
    return turns[_cheap_at_both_ends(num_turns)]


def _ranks_of_equal_load(turn_costs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Deals the rows of each turn so that loads are equal: a permutation of the ranks for each turn, [num_turns,
    dp_size], for costs of that shape, decreasing within a turn."""
    ranks = np.empty(turn_costs.shape, np.int64)
    loads = np.zeros(turn_costs.shape[1], np.int64)
    for turn, row_costs in enumerate(turn_costs):
        ranks[turn] = _deal(loads, row_costs)
    # once all are dealt, dealing a turn again never makes the spread larger
    for _ in range(_MAX_ROUNDS):
        before = loads.copy()
        for turn, row_costs in enumerate(turn_costs):
            loads[ranks[turn]] -= row_costs
            ranks[turn] = _deal(loads, row_costs)
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
        most_turn, least_turn = np.unravel_index(np.abs(2 * differences - gap).argmin(), differences.shape)
        difference = int(differences[most_turn, least_turn])
        if not 0 < difference < gap:
            return
        turns[most_turn, most], turns[least_turn, least] = turns[least_turn, least], turns[most_turn, most]
        loads[most] -= difference
        loads[least] += difference


def _cheap_at_both_ends(num_turns: int) -> NDArray[np.int64]:
    """Orders turns, which are sorted from the most expensive: ..., 3, 1, 0, 2, 4, ...

    A pipeline fills with its first microbatch and drains with its last one while other stages wait; in between a stage
    waits for the difference between consecutive microbatches.
    """
    dearest_first = np.arange(num_turns)
    return np.concatenate([dearest_first[1::2][::-1], dearest_first[0::2]])
