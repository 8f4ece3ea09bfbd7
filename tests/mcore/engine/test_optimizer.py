"""The gradient norm of large tensors."""

import pytest
import torch

from mtrain.mcore.engine.optimizer import _sum_of_squares


def test_the_norm_of_millions_of_elements_is_exact_to_rounding() -> None:
    gradients = [torch.randn(2**22, generator=torch.Generator().manual_seed(0)), torch.full((3,), 7.0)]
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert float(_sum_of_squares(gradients, torch.device("cpu"))) == pytest.approx(exact, rel=1e-12)
    in_float32 = float(torch.stack(torch._foreach_norm(gradients)).double().square().sum())
    assert abs(in_float32 / exact - 1) > 1e-5  # what the promise of 1e-5 would have lost


def test_a_rank_without_gradients_adds_nothing() -> None:
    assert float(_sum_of_squares([], torch.device("cpu"))) == 0.0
