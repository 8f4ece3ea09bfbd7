"""Axes: order is kept, labels tell values apart, and what is no number has a place of its own."""

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mtrain.verify.drawing.axis import MAX_TICKS, Axis, linear_axis, log_axis, step_axis

numbers = st.floats(-1e12, 1e12)
positive = st.floats(1e-300, 1e300)


def assert_is_sound(axis: Axis, low: float, high: float) -> None:
    positions = [tick.position for tick in axis.ticks]
    labels = [tick.label for tick in axis.ticks]
    assert len(set(labels)) == len(labels) > 0
    assert all(low - 0.01 <= position <= high + 0.01 for position in positions)
    assert positions == sorted(positions)
    assert len(labels) <= 2 * MAX_TICKS


@given(st.lists(numbers, min_size=1, max_size=9))
@example([2041.0, 2041.0])
@example([0.0])
@example([1e9, 1e9 + 1])
def test_a_linear_axis_keeps_the_order_and_tells_its_ticks_apart(values: list[float]) -> None:
    axis = linear_axis(values, 0.0, 200.0)
    assert_is_sound(axis, 0, 200)
    placed = [axis.place(value) for value in sorted(values)]
    assert placed == sorted(placed)
    assert all(0 < place < 200 for place in placed)


def test_the_ticks_of_a_linear_axis_say_where_they_are() -> None:
    axis = linear_axis([4.1, 4.9, math.nan, math.inf], 100.0, 0.0)
    assert [tick.label for tick in axis.ticks] == ["4.2", "4.4", "4.6", "4.8"]
    assert all(axis.place(float(tick.label)) == pytest.approx(tick.position) for tick in axis.ticks)


@given(st.sets(st.integers(1, 10**6), min_size=1, max_size=9))
def test_an_axis_of_steps_has_whole_numbers(steps: set[int]) -> None:
    axis = step_axis(sorted(steps), 0.0, 300.0)
    assert_is_sound(axis, 0, 300)
    assert all(axis.place(int(tick.label)) == tick.position for tick in axis.ticks)


@given(st.lists(st.one_of(positive, st.just(0.0), st.sampled_from([math.inf, math.nan])), min_size=1, max_size=9))
def test_an_axis_of_logarithms_has_room_for_0_and_for_what_is_no_number(values: list[float]) -> None:
    axis = log_axis(values, 0.0, 150.0)
    assert_is_sound(axis, 0, 150)
    finite = sorted(value for value in values if math.isfinite(value))
    placed = [axis.place(value) for value in finite]
    for (a, b), (at, after) in zip(itertools.pairwise(finite), itertools.pairwise(placed)):
        assert at <= after
        assert at < after or a > 0 or b == 0, "0 is told from everything else"
    if not all(math.isfinite(value) for value in values):
        assert axis.place(math.nan) == axis.place(math.inf) > max(placed, default=0.0)
        assert axis.ticks[-1].label == "∞, nan"
    assert (axis.ticks[0].label == "0") == (0.0 in values)
