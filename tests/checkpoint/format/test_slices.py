"""A run of elements and its boxes are the same elements."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mtrain.base.tensor_slice import slices_of_run

shapes = st.lists(st.integers(1, 5), max_size=4)


@given(shapes, st.data())
def test_slices_are_the_run_in_order_and_few(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    start, end = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    numbers = np.arange(size).reshape(shape)
    slices = list(slices_of_run(shape, start, end))
    found = []
    for first, at in slices:
        within = numbers[tuple(slice(begin, begin + length) for begin, length in zip(at.offset, at.shape))]
        assert within.shape == at.shape
        assert list(within.flatten()) == list(range(first, first + at.num_elements))
        found += list(within.flatten())
    assert found == list(range(start, end))
    assert len(slices) <= max(1, 2 * len(shape) - 1)
