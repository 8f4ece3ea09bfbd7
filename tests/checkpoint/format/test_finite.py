"""Numbers that are not finite are found wherever they lie."""

import math

import pytest
import torch

from mtrain.base.tensor_slice import TensorSlice
from mtrain.core.state.finite import NonFinite, described, non_finite
from mtrain.core.state.shard import Shard


def part(key: str, values: torch.Tensor, *offset: int) -> Shard:
    """Builds a box whose values lie flat in memory, as in a shard of an optimizer's buffer."""
    return Shard(key, (9, 9), TensorSlice(offset, tuple(values.shape)), values.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_one_is_named_by_its_place_in_the_whole_tensor(dtype: torch.dtype, value: float) -> None:
    good, bad = torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype), -torch.rand(3, 4).to(dtype)
    parts = [part("a", good, 0, 0), part("b", bad, 5, 2), part("b", bad.clone(), 2, 2)]
    assert non_finite(parts) is None
    bad[1, 3] = bad[2, 0] = value
    assert non_finite(parts) == NonFinite(f"b[6, 5] is {value}", 1)


def test_integers_and_empty_shards_are_left_out() -> None:
    assert non_finite([]) is None
    states = torch.full((2, 2), 255, dtype=torch.uint8)
    assert non_finite([part("random", states, 0, 0), part("none", torch.empty(0, 3), 0, 0)]) is None
    assert non_finite([Shard("scalar", (), TensorSlice((), ()), torch.tensor(math.nan))]) == NonFinite(
        "scalar[] is nan", 1
    )


def test_the_ranks_are_named() -> None:
    one, three = NonFinite("a[0] is nan", 1), NonFinite("b[1] is inf", 3)
    assert described([None, None]) is None
    assert described([None, one]) == "a[0] is nan on rank 1"
    assert described([three, None]) == "b[1] is inf on rank 0, one of 3 such tensors there"
    assert described([None, one, three]) == "a[0] is nan on rank 1; more on rank 2"
    assert described([one] * 12) == "a[0] is nan on rank 0; more on 11 ranks: 1, 2, 3, 4, 5, 6, 7, 8, ..."
