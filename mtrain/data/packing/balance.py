"""Rows to data-parallel ranks, so that ranks do equal work.

What is balanced: ranks of a pipeline, and of one that exchanges tokens between experts, wait for each other at every
microbatch, all others at the end of the step. So the rows that the ranks compute at the same time are neighbours in a
list sorted by cost, which makes the sum over microbatches of the dearest row as small as it can be; and among the
ranks they are dealt so that the sums over the step are equal.
"""

import numpy as np
from numpy.typing import NDArray

_MAX_ROUNDS = 16


def costs(lengths: NDArray[np.int64], hidden_size: int) -> NDArray[np.int64]:
    """What samples cost: 6 * hidden_size * length + length^2.

    The first part is of the products with weights, the second of attention, which sees its own sample alone: 24 hidden
    size^2 and 4 hidden_size x length multiplications and additions a token and layer, with an FFN of four times the
    hidden size. Whole numbers, so that all machines deal alike.
    """
    wide = lengths.astype(np.int64)
    return wide * (6 * hidden_size + wide)


def dealt(row_costs: NDArray[np.int64], num_turns: int, dp_size: int) -> NDArray[np.int64]:
    """Deals rows to ranks.

    Args:
        row_costs: [num_rows], num_rows <= num_turns x dp_size.
        num_turns: PackedRows of every rank.
        dp_size: Ranks.

    Returns:
        [num_turns, dp_size]: the row that each rank computes in each turn, -1 for none. Turns cost less at both ends
        than in the middle.
    """
    dearest_first = np.argsort(-row_costs, kind="stable")
    missing = num_turns * dp_size - len(row_costs)
    turns = np.pad(dearest_first, (0, missing), constant_values=-1).reshape(num_turns, dp_size)
    # -1 takes the 0 at the end
    turn_costs = np.append(row_costs, 0)[turns]
    ranks = _ranks_of_equal_load(turn_costs)
    by_rank = np.empty_like(turns)
    np.put_along_axis(by_rank, ranks, turns, axis=1)
    return by_rank[_cheap_at_both_ends(num_turns)]


def _ranks_of_equal_load(turn_costs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Who takes what in each turn.

    Args:
        turn_costs: [num_turns, dp_size], decreasing within a turn.

    Returns:
        [num_turns, dp_size]: a permutation of the ranks for each turn.
    """
    ranks = np.empty(turn_costs.shape, np.int64)
    loads = np.zeros(turn_costs.shape[1], np.int64)
    for turn, each in enumerate(turn_costs):
        ranks[turn] = _deal(loads, each)
    # once all are dealt, a turn taken back and dealt again makes the spread smaller or leaves it
    for _ in range(_MAX_ROUNDS):
        before = loads.copy()
        for turn, each in enumerate(turn_costs):
            loads[ranks[turn]] -= each
            ranks[turn] = _deal(loads, each)
        if np.array_equal(loads, before):
            break
    return ranks


def _deal(loads: NDArray[np.int64], descending: NDArray[np.int64]) -> NDArray[np.int64]:
    """Gives the dearest row to the rank with the least load, and so on; adds to `loads`."""
    ranks = np.argsort(loads, kind="stable")
    loads[ranks] += descending
    return ranks


def _cheap_at_both_ends(num_turns: int) -> NDArray[np.int64]:
    """An order of turns that are sorted from the dearest: ..., 3, 1, 0, 2, 4, ...

    A pipeline fills with its first microbatch and drains with its last one, and later stages wait for both; in between
    a stage waits for the difference between one microbatch and the next.
    """
    dearest_first = np.arange(num_turns)
    return np.concatenate([dearest_first[1::2][::-1], dearest_first[0::2]])
