"""Whole tensors out of the shards of all ranks."""

import pytest
import torch
from torch import Tensor

from mtrain.base.tensor_slice import TensorSlice
from mtrain.core.state.shard import Shard
from tests.core.state.gathering import assemble
from tests.messages import refuses


def shard(values: Tensor, offset: int = 0, size: int = 2) -> Shard:
    return Shard("weight", (size,), TensorSlice((offset,), tuple(values.shape)), values)


def test_shards_overlap_where_ranks_hold_the_same() -> None:
    whole = assemble([shard(torch.tensor([1.0, 2.0]), 0, 3), shard(torch.tensor([2.0, 3.0]), 1, 3)])
    assert whole["weight"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_nan_on_two_ranks_is_no_difference(dtype: torch.dtype) -> None:
    values = torch.tensor([float("nan"), 1.0], dtype=dtype)
    assert assemble([shard(values), shard(values.clone())])["weight"].isnan().tolist() == [True, False]


@pytest.mark.parametrize("other", [[0.0, 1.0], [-0.0, 2.0], [float("nan"), 1.0]], ids=["sign of 0", "value", "nan"])
def test_replicas_differ_by_a_bit(other: list[float]) -> None:
    with refuses(ValueError):
        assemble([shard(torch.tensor([-0.0, 1.0])), shard(torch.tensor(other))])


def test_a_gap_is_named() -> None:
    with refuses(ValueError):
        assemble([shard(torch.tensor([1.0]))])
