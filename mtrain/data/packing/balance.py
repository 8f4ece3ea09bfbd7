"""Assignment of rows to data-parallel ranks, so that ranks do equal work.

A rank computes one row in each turn. Ranks wait for each other at the end of a step, so the sum of a rank's rows
decides, whether its microbatches pass through a pipeline or not. Where ranks exchange tokens between experts they wait
in every turn, and the sum over turns of the most expensive row decides. Rows sorted by cost and cut into turns make
that as small as possible; within turns they are then dealt so that the sums are equal. Ranks that wait only at the end
may also exchange rows of different turns, which makes their sums more equal.
"""

import numpy as np
from numpy.typing import NDArray

_MAX_ROUNDS = 16
_EQUAL_ENOUGH = 1.001
"""Ratio of the largest load to the mean below which no exchange is tried."""


def costs(lengths: NDArray[np.int64], hidden_size: int) -> NDArray[np.int64]:
    """Estimates the cost of samples: 6 * hidden_size * length + length^2.

    The first part is for the products with weights, the second for attention, which sees its own sample alone: 24
    hidden size^2 and 4 hidden_size x length multiplications and additions a token and layer, with an FFN of four times
    the hidden size. Whole numbers, so that all machines deal alike.
    """
    wide = lengths.astype(np.int64)
    return wide * (6 * hidden_size + wide)


def dealt(row_costs: NDArray[np.int64], num_turns: int, dp_size: int, wait_in_turns: bool) -> NDArray[np.int64]:
    """Deals rows to ranks; the same on every machine.

    Args:
        row_costs: [num_rows] cost of each row; num_rows <= num_turns x dp_size.
        num_turns: Number of rows of every rank.
        dp_size: Number of data-parallel ranks.
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
    """Deals the rows of each turn to the ranks so that loads are equal.

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
    """Gives the most expensive row to the rank with the least load, and so on; adds to `loads`."""
    ranks = np.argsort(loads, kind="stable")
    loads[ranks] += descending
    return ranks


def _exchange(turns: NDArray[np.int64], row_costs: NDArray[np.int64]) -> None:
    """Exchanges rows between the ranks with the most and the least work as long as that brings them closer.

    Args:
        turns: [num_turns, dp_size] rows; changed in place.
        row_costs: Cost of each row, with 0 at the end for -1.
    """
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

    A pipeline fills with its first microbatch and drains with its last one, and other stages wait for both; in between
    a stage waits for the difference between one microbatch and the next.
    """
    dearest_first = np.arange(num_turns)
    return np.concatenate([dearest_first[1::2][::-1], dearest_first[0::2]])
