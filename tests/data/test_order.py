"""Order of samples by arithmetic."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.base.errors import ConfigError
from mtrain.core.batch.order import (
    PERIOD_LIMIT,
    Blend,
    SampleOrder,
    SamplePosition,
    key_of,
    permutation,
    permuted,
    slots,
    whole_weights,
)
from tests.messages import refuses

SEEDS = st.integers(0, 2**63)
WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@settings(max_examples=12)
@given(weights=WEIGHTS, n=st.integers(0, 600))
def test_every_prefix_of_a_blend_holds_each_share_within_one(weights: list[float], n: int) -> None:
    """The samples of each source are numbered without gaps, too."""
    blend = Blend(weights)  # a period of up to 100,000 turns: most of this test's time
    counts: Counter[int] = Counter()
    for turn in map(blend.locate, range(n)):
        assert turn.number == counts[turn.source]
        counts[turn.source] += 1
    for source, weight in enumerate(weights):
        assert abs(counts[source] - n * weight / sum(weights)) <= 1


@given(parts=st.lists(st.integers(1, 60), min_size=2, max_size=6))
def test_the_error_keeps_tijdemans_bound_and_is_zero_after_a_period(parts: list[int]) -> None:
    blend = Blend(parts)
    chosen = np.array([blend.locate(n).source for n in range(blend.period)])
    counts = np.cumsum(chosen[:, None] == np.arange(len(parts)), axis=0)
    turns = np.arange(1, blend.period + 1)[:, None]
    error = np.abs(counts * blend.period - turns * np.array(blend.parts))  # in units of 1 / period: whole numbers
    bound = blend.period * (2 * len(parts) - 3)
    assert error.max() * (2 * len(parts) - 2) <= bound
    assert not error[-1].any()


@given(parts=st.lists(st.integers(1, 60), min_size=1, max_size=6), start=st.integers(0, 10**15))
def test_shares_hold_far_from_the_start(parts: list[int], start: int) -> None:
    blend = Blend(parts)
    for n in range(start, start + 50):
        turn = blend.locate(n)
        assert abs(turn.number - n * parts[turn.source] / sum(parts)) <= 1


def test_the_numbering_goes_on_over_the_period() -> None:
    blend = Blend([0.7, 0.3])
    assert blend.period == 10
    assert [blend.locate(n).number for n in range(30) if blend.locate(n).source == 1] == list(range(9))


def test_weights_keep_their_proportion_as_written() -> None:
    assert whole_weights([0.7, 0.3]) == [7, 3]
    assert whole_weights([2.0, 4.0, 6.0]) == [1, 2, 3]
    assert whole_weights([5.0]) == [1]


def test_odd_weights_are_rounded_to_the_longest_period() -> None:
    parts = whole_weights([1 / 3, 2 / 3, 0.1234567])
    assert sum(parts) == PERIOD_LIMIT
    assert parts[1] == pytest.approx(PERIOD_LIMIT * (2 / 3) / 1.1234567, abs=1)


def test_a_share_too_small_to_be_met_is_refused() -> None:
    with refuses(ConfigError, "1/100000"):
        whole_weights([1.0, 1e-7])


@given(size=st.integers(1, 300), key=SEEDS)
def test_a_permutation_meets_every_index_once(size: int, key: int) -> None:
    order = permutation(size, key)
    assert sorted(order.tolist()) == list(range(size))
    assert order.tolist() == [permuted(index, size, key) for index in range(size)]


@given(index=st.integers(0, 2**50 - 1), key=SEEDS)
def test_large_ranges_are_permuted_without_a_table(index: int, key: int) -> None:
    assert 0 <= permuted(index, 2**50, key) < 2**50


def test_permutations_are_even_over_keys() -> None:
    """Chi-square tests at 5 sigma: where index 0 of 7 goes, and the 6 orders of 3 elements."""
    places = Counter(permuted(0, 7, key_of(key)) for key in range(7000))
    assert sum((places[place] - 1000) ** 2 / 1000 for place in range(7)) < 6 + 5 * np.sqrt(12)
    orders = Counter(tuple(permutation(3, key_of(key))) for key in range(6000))
    assert sum((orders[order] - 1000) ** 2 / 1000 for order in orders) < 5 + 5 * np.sqrt(10)
    assert len(orders) == 6


def test_keys_depend_on_every_word_and_their_order() -> None:
    keys = {key_of(*words) for words in [(), (0,), (0, 0), (1, 0), (0, 1), (1, 1), (2**63, 1), (1, 2**63)]}
    assert len(keys) == 8


@given(seed=SEEDS, sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_each_epoch_of_each_source_visits_every_sample_once(seed: int, sizes: list[int]) -> None:
    order = SampleOrder(seed, Blend([1.0] * len(sizes)), sizes)
    visits: Counter[tuple[int, int, int]] = Counter()
    for g in range(3 * max(sizes) * len(sizes)):
        place = order.locate(g)
        visits[place.source, place.epoch, place.index] += 1
    assert max(visits.values()) == 1
    for source, size in enumerate(sizes):
        assert {index for s, epoch, index in visits if s == source and epoch == 0} == set(range(size))


def test_epochs_sources_and_seeds_have_orders_of_their_own() -> None:
    def indices(seed: int, source: int, epoch: int) -> list[int]:
        order = SampleOrder(seed, Blend([1.0, 1.0]), [50, 50])
        places = [order.locate(g) for g in range(200)]
        return [place.index for place in places if (place.source, place.epoch) == (source, epoch)]

    assert len({tuple(indices(*case)) for case in [(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)]}) == 4


def test_the_order_stays_what_it_was_in_the_first_release() -> None:
    """A run that resumes after an update must go on where it was."""
    order = SampleOrder(1234, Blend([0.7, 0.3]), [10, 1000])
    places = [order.locate(g) for g in (0, 1, 2, 50, 10**12)]
    assert [(place.source, place.epoch, place.index) for place in places] == [
        (0, 0, 8),
        (1, 0, 4),
        (0, 0, 0),
        (0, 3, 5),
        (0, 70000000000, 8),
    ]


@given(dp=st.integers(1, 4), micro=st.integers(1, 4), count=st.integers(1, 4))
def test_the_ranks_slots_make_up_the_global_batch(dp: int, micro: int, count: int) -> None:
    read = [slot for m in range(count) for rank in range(dp) for slot in slots(m, rank, dp, micro)]
    assert read == list(range(dp * micro * count))


@settings(max_examples=25)
@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    seed=SEEDS,
    numbers=st.lists(st.integers(0, 10**12) | st.integers(0, 200), max_size=30),
)
def test_many_samples_lie_where_each_lies(
    weights: list[float], sizes: list[int], seed: int, numbers: list[int]
) -> None:
    order = SampleOrder(seed, Blend(weights), sizes[: len(weights)])
    found: dict[int, SamplePosition] = {}
    for own in order.locate_all(np.array(numbers, np.int64)):
        for position, index in zip(own.positions.tolist(), own.indices.tolist(), strict=True):
            assert position not in found
            found[position] = SamplePosition(own.source, own.epoch, index)
    assert found == {position: order.locate(number) for position, number in enumerate(numbers)}
