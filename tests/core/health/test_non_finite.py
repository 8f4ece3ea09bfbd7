"""The one number that each step records of a parameter's gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mtrain.core.engine.non_finite import largest_local_gradients
from mtrain.core.engine.sharded_model import DataParallel

NAN, INF = math.nan, math.inf


class _Gradients(DataParallel):
    """Gradients of one rank, without a model."""

    def __init__(self, gradients: list[list[float]]) -> None:
        self._pairs = [(torch.zeros(len(each)), torch.tensor(each)) for each in gradients]

    def local_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._pairs)


@pytest.mark.parametrize(
    ("gradient", "largest"),
    [
        ([1.0, -3.0, 2.0], 3.0),
        ([0.5, 4.0], 4.0),
        ([0.0], 0.0),
        ([1.0, NAN, 5.0], NAN),
        ([NAN, INF], NAN),
        ([-INF, 1.0], INF),
        ([INF, 1.0], INF),
        ([3e38] * 20, 3e38),  # whose sum is not finite
    ],
)
def test_it_is_the_largest_absolute_value_and_keeps_what_is_not_finite(gradient: list[float], largest: float) -> None:
    found = largest_local_gradients(_Gradients([[1.0, -2.0], [], gradient]))
    assert found is not None
    torch.testing.assert_close(found, torch.tensor([2.0, largest]), rtol=0, atol=0, equal_nan=True)


def test_a_rank_without_gradients_has_none() -> None:
    assert largest_local_gradients(_Gradients([])) is None
    assert largest_local_gradients(_Gradients([[]])) is None
