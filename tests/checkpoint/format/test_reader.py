"""Boxes of global tensors are put together exactly, or not at all."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.format.writer import Shard, write_metadata, write_shards
from tests.messages import refuses

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
