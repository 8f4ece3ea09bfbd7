"""Steps of rows: every sample once, whatever was asked before."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mtrain.core.batch.sample import Sample
from mtrain.data.sources import Blended
from mtrain.data.steps import NextEpoch, StepsOfRows, Widths, Windows
from tests.data.packing.oracle import best_fit_decreasing

WIDTH = 24


def widths(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns widths of samples of 1 to WIDTH tokens."""
    found: NDArray[np.int64] = numbers * 7919 % 101 % WIDTH + 1
    return found


@dataclass(frozen=True)
class Shape:
    """Sizes and seed of steps of rows."""

    window: int
    num_rows: int
    seed: int
    row_width: int = WIDTH
    later: tuple[tuple[int, int], ...] = ()

    def steps(self, of: Widths = widths, next_epoch: NextEpoch = lambda number: None) -> StepsOfRows:
        windows = Windows(self.num_rows, self.row_width, self.window, self.later)
        return StepsOfRows(of, windows, self.seed, next_epoch)


SHAPES = st.builds(Shape, window=st.integers(1, 30), num_rows=st.integers(1, 6), seed=st.integers(0, 2**63))


def rows_of(shape: Shape, step: int, steps: StepsOfRows | None = None) -> list[list[int]]:
    found = (shape.steps() if steps is None else steps).samples(step)
    assert found.rows is not None
    return [found.numbers[found.rows.of(number)].tolist() for number in range(len(found.rows.ends))]


@settings(max_examples=60)
@given(SHAPES, st.integers(1, 12))
def test_steps_hold_every_sample_once_window_after_window(shape: Shape, num_steps: int) -> None:
    rows = shape.steps()
    steps = [rows_of(shape, step, rows) for step in range(num_steps)]
    assert [len(step) for step in steps] == [shape.num_rows] * num_steps
    seen = [number for step in steps for row in step for number in row]
    assert len(seen) == len(set(seen))
    # all samples of the windows before the last one that was begun, and some of that window
    complete = max(seen) // shape.window * shape.window
    assert set(range(complete)) <= set(seen)
    assert max(seen) < complete + shape.window


@settings(max_examples=60)
@given(SHAPES)
def test_rows_of_a_window_are_those_of_plain_best_fit_decreasing(shape: Shape) -> None:
    rows = shape.steps()
    expected = [
        best_fit_decreasing(widths(np.arange(window * shape.window, (window + 1) * shape.window)).tolist(), WIDTH)
        for window in range(3)
    ]
    steps = -(-sum(map(len, expected)) // shape.num_rows)
    found = [row for step in range(steps) for row in rows_of(shape, step, rows)]
    for window in expected:
        own, found = found[: len(window)], found[len(window) :]
        assert sorted(sorted(widths(np.array(row)).tolist()) for row in own) == sorted(map(sorted, window))


@settings(max_examples=60)
@given(SHAPES, st.lists(st.tuples(st.integers(1, 8), st.integers(1, 40)), unique_by=lambda each: each[0], max_size=3))
def test_other_windows_begin_with_a_step_and_lose_nothing(shape: Shape, later: list[tuple[int, int]]) -> None:
    """Earlier steps stay as they were, a window that was begun is trained as it was packed, and every sample comes
    once."""
    changed, first = replace(shape, later=tuple(sorted(later))), min((step for step, _ in later), default=12)
    rows, former = changed.steps(), shape.steps()
    steps = [rows_of(changed, step, rows) for step in range(12)]
    assert steps[:first] == [rows_of(shape, step, former) for step in range(first)]
    seen = [number for step in steps for row in step for number in row]
    assert len(seen) == len(set(seen))
    largest = max([shape.window, *(window for _, window in later)])
    assert set(range(max(seen) + 1 - largest)) <= set(seen)


@settings(max_examples=60)
@given(SHAPES, st.lists(st.integers(0, 15), min_size=1, max_size=6))
def test_a_step_does_not_depend_on_what_was_asked_before(shape: Shape, steps: list[int]) -> None:
    rows = shape.steps()
    for step in steps:
        assert rows_of(shape, step, rows) == rows_of(shape, step)


def test_rows_are_shuffled_by_seed_and_window() -> None:
    orders = set()
    for seed in (1, 2):
        shape = Shape(window=40, row_width=WIDTH, num_rows=1, seed=seed)
        rows = shape.steps(lambda numbers: np.full(len(numbers), WIDTH))
        for window in (0, 1):
            orders.add(tuple(rows.samples(40 * window + i).numbers[0] - 40 * window for i in range(40)))
    assert len(orders) == 4
    assert all(sorted(order) == list(range(40)) and order != tuple(range(40)) for order in orders)


def test_long_samples_do_not_come_first() -> None:
    """Best-fit-decreasing puts long samples in front; later steps of a run must not have fewer and fewer tokens a
    sample."""
    shape = Shape(window=4000, row_width=1000, num_rows=10, seed=3)
    lengths = np.random.default_rng(0).lognormal(5, 1, 4000).astype(np.int64).clip(1, 1000)
    rows = shape.steps(lambda numbers: lengths[numbers % 4000])
    sizes = [len(rows.samples(step).numbers) for step in range(40)]
    assert np.mean(sizes[:20]) == pytest.approx(np.mean(sizes[20:]), rel=0.2)


@dataclass
class Sized:
    """A source of as many samples as it is asked for, 1 to WIDTH positions wide."""

    size: int
    fingerprint: str = ""

    def __len__(self) -> int:
        return self.size

    def widths(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return widths(indices)

    def sample(self, epoch: int, index: int) -> Sample:
        raise NotImplementedError  # only lengths decide about rows

    def why_nothing(self) -> str | None:
        raise NotImplementedError


SOURCES = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.1, 0.5, 1.0, 3.0])), min_size=1, max_size=3)


@settings(max_examples=80)
@given(SHAPES, SOURCES, st.sampled_from([1, 7, 40, 65536]), st.integers(0, 2**63))
def test_epochs_follow_one_another_whatever_the_window(
    shape: Shape, sources: list[tuple[int, float]], window: int, seed: int
) -> None:
    """Row by row, no sample of a source comes again before all others of it have come."""
    sizes = [size for size, _ in sources]
    stream = Blended(seed, [weight for _, weight in sources], [Sized(size) for size in sizes])
    steps = replace(shape, window=window).steps(stream.widths, stream.next_epoch)
    read = [Counter[int]() for _ in sizes]
    for step in range(12):
        for row in rows_of(shape, step, steps):
            for place in map(stream.locate, row):
                read[place.source][place.index] += 1
            for counts, size in zip(read, sizes):
                assert max(counts.values(), default=0) <= min(counts[index] for index in range(size)) + 1
    turns = [number for step in range(12) for number in steps.samples(step).numbers.tolist()]
    assert len(set(turns)) == len(turns)


@settings(max_examples=60)
@given(SOURCES, st.integers(0, 200))
def test_a_window_ends_where_the_first_source_begins_again(sources: list[tuple[int, float]], first: int) -> None:
    """Counted one by one."""
    stream = Blended(1, [weight for _, weight in sources], [Sized(size) for size, _ in sources])
    epochs: dict[int, set[int]] = {}
    end = first
    while all(len(found) == 1 for found in epochs.values()):
        place = stream.locate(end)
        epochs.setdefault(place.source, set()).add(place.epoch)
        end += 1
    assert stream.next_epoch(first) == end - 1
