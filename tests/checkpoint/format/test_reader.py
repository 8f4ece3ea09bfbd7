"""Boxes of global tensors are put together exactly, or not at all; a run of elements and its boxes are the same."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import TensorSlice, slices_of_run
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.format.writer import write_metadata, write_shards
from mtrain.core.state.shard import Shard
from tests.messages import refuses

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


VALUES = torch.arange(24.0).view(4, 6)


def saved(folder: Path, offsets: list[tuple[int, int]], sizes: tuple[int, int]) -> CheckpointTensors:
    """Saves VALUES in slices of one size."""

    def cut(row: int, column: int) -> Tensor:
        return VALUES[row : row + sizes[0], column : column + sizes[1]].contiguous()

    parts = [Shard("w", (4, 6), TensorSlice(offset, sizes), cut(*offset)) for offset in offsets]
    write_metadata(folder, write_shards(folder / "__0_0.distcp", parts).tensors)
    return CheckpointTensors(folder)


@pytest.mark.parametrize(("offsets", "sizes"), [((0, 0), (4, 6)), ((1, 2), (2, 3)), ((3, 5), (1, 1)), ((2, 0), (2, 6))])
def test_any_slice_comes_from_the_slices_that_were_saved(
    tmp_path: Path, offsets: tuple[int, int], sizes: tuple[int, int]
) -> None:
    tensors = saved(tmp_path, [(0, 0), (0, 3), (2, 0), (2, 3)], (2, 3))
    rows, columns = (slice(first, first + size) for first, size in zip(offsets, sizes))
    assert torch.equal(tensors.read("w", TensorSlice(offsets, sizes)), VALUES[rows, columns])


def test_slices_that_overlap_do_not_hide_a_gap(tmp_path: Path) -> None:
    """The slices have as many elements as the tensor; positions without a slice would hold arbitrary memory."""
    tensors = saved(tmp_path, [(0, 0), (1, 0)], (2, 6))
    with refuses(DataError, "[4, 6]"):
        tensors.read("w", TensorSlice.whole((4, 6)))
