"""Rows dealt to ranks: equal work, by brute force and on lengths as they occur."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mtrain.data.packing.step_plan import StepShape, costs, dealt, plan_step

COSTS = st.lists(st.integers(1, 1000), min_size=1, max_size=40)
NUM_RANKS, ROWS_A_RANK = 64, 8


def work(row_costs: list[int], turns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [num_turns, dp_size] costs."""
    return np.array([*row_costs, 0])[turns]


def deal(row_costs: list[int], dp_size: int, wait_in_turns: bool) -> NDArray[np.int64]:
    return dealt(np.array(row_costs), -(-len(row_costs) // dp_size), dp_size, wait_in_turns)


@settings(max_examples=100)
@given(COSTS, st.integers(1, 6), st.booleans())
@example([5], 3, False)
def test_every_row_is_dealt_once(row_costs: list[int], dp_size: int, wait_in_turns: bool) -> None:
    turns = deal(row_costs, dp_size, wait_in_turns)
    assert sorted(turns[turns >= 0].tolist()) == list(range(len(row_costs)))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=4, max_size=4))
def test_two_ranks_with_two_rows_each_are_as_equal_as_can_be(row_costs: list[int]) -> None:
    best = min(max(sum(half), sum(row_costs) - sum(half)) for half in itertools.combinations(row_costs, 2))
    assert work(row_costs, deal(row_costs, 2, wait_in_turns=False)).sum(axis=0).max() == best


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=6, max_size=6))
def test_ranks_that_wait_in_turns_wait_as_little_as_can_be(row_costs: list[int]) -> None:
    best = min(sum(max(order[start : start + 2]) for start in (0, 2, 4)) for order in itertools.permutations(row_costs))
    assert work(row_costs, deal(row_costs, 2, wait_in_turns=True)).max(axis=1).sum() == best


@settings(max_examples=100)
@given(COSTS, st.integers(1, 6))
def test_exchanges_make_no_rank_slower(row_costs: list[int], dp_size: int) -> None:
    in_turns, at_the_end = (
        work(row_costs, deal(row_costs, dp_size, wait_in_turns)).sum(axis=0).max() for wait_in_turns in (True, False)
    )
    assert at_the_end <= in_turns


def test_a_pipeline_fills_and_drains_with_cheap_rows() -> None:
    turns = deal([1, 2, 3, 4, 5], 1, wait_in_turns=False)
    assert work([1, 2, 3, 4, 5], turns)[:, 0].tolist() == [2, 4, 5, 3, 1]


def test_a_sample_costs_its_products_and_its_attention() -> None:
    assert costs(np.array([1, 10, 2**24]), 8).tolist() == [49, 580, 48 * 2**24 + 2**48]


@pytest.mark.parametrize("median", [2000, 4000, 8000])
def test_long_documents_are_balanced(median: int) -> None:
    """Lengths are log-normal up to 32k, on 64 ranks with 8 rows each; in random order the imbalance is 1.2 to 1.5."""
    width = 32768
    lengths = np.random.default_rng(median).lognormal(np.log(median), 1.0, 40_000).astype(np.int64).clip(1, width)
    budget = int(0.998 * NUM_RANKS * ROWS_A_RANK * width)
    lengths = lengths[: int(np.searchsorted(lengths.cumsum(), budget))]
    plan = plan_step(lengths, StepShape(width, 1, NUM_RANKS, hidden_size=4096))
    assert plan.num_microbatches == ROWS_A_RANK
    sums = [
        sum(
            int(costs(lengths[list(row)], 4096).sum())
            for microbatch in range(ROWS_A_RANK)
            for row in plan.rows(microbatch, rank)
        )
        for rank in range(NUM_RANKS)
    ]
    assert max(sums) * NUM_RANKS / sum(sums) <= 1.012
