"""The one number that each step records of a parameter's gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mtrain.core.engine.non_finite import largest_local_gradients

NAN, INF = math.nan, math.inf


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
    chunk = torch.nn.Module()
    for name, values in {"first": [1.0, -2.0], "second": gradient}.items():
        parameter: Any = torch.nn.Parameter(torch.zeros(len(values)))
        parameter.main_grad = torch.tensor(values)
        chunk.register_parameter(name, parameter)
    found = largest_local_gradients([chunk])
    assert found is not None
    torch.testing.assert_close(found, torch.tensor([2.0, largest]), rtol=0, atol=0, equal_nan=True)


def test_a_rank_without_gradients_has_none() -> None:
    assert largest_local_gradients([torch.nn.Module()]) is None
