"""Samples in rows: the rows of plain best-fit-decreasing."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtrain.data.packing.step_plan import PackedRows, packed
from tests.data.packing.oracle import best_fit_decreasing

WIDTH = 40
LENGTHS = st.lists(st.integers(1, WIDTH), max_size=80)


def rows_of(rows: PackedRows) -> list[tuple[int, ...]]:
    return [tuple(rows.of(number).tolist()) for number in range(len(rows.ends))]


def contents(lengths: list[int], width: int = WIDTH) -> list[list[int]]:
    rows = rows_of(packed(np.array(lengths, np.int64), width))
    return sorted([lengths[sample] for sample in row] for row in rows)


@given(LENGTHS)
@example([])
@example([WIDTH] * 3)
def test_every_sample_lies_in_one_row_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = rows_of(packed(np.array(lengths, np.int64), WIDTH))
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[sample] for sample in row) <= WIDTH for row in rows)


@settings(max_examples=200)
@given(LENGTHS)
@example([21, 21, 10, 10, 9, 9, 5, 5, 4, 4, 1])
def test_rows_are_those_of_plain_best_fit_decreasing(lengths: list[int]) -> None:
    assert contents(lengths) == sorted(best_fit_decreasing(lengths, WIDTH))


def test_rows_are_those_of_plain_best_fit_decreasing_for_wide_rows() -> None:
    # wider than 16 bits, in which lengths are sorted
    lengths = np.random.default_rng(0).lognormal(9, 1, 300).astype(np.int64).clip(1, 100_000).tolist()
    assert max(lengths) > 2**16
    assert contents(lengths, 100_000) == sorted(best_fit_decreasing(lengths, 100_000))


@given(LENGTHS, st.randoms())
def test_the_order_of_samples_changes_no_lengths_in_rows(lengths: list[int], random: object) -> None:
    shuffled = sorted(lengths, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert contents(shuffled) == contents(lengths)


def test_equal_samples_keep_their_order() -> None:
    assert rows_of(packed(np.array([2, 3, 2, 3, 2]), 5)) == [(1, 0), (3, 2), (4,)]
