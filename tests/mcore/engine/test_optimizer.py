"""The gradient norm of large tensors."""

import pytest
import torch

from mtrain.mcore.engine.optimizer import _BLOCK, _sum_of_squares


def test_the_norm_of_millions_of_elements_is_exact_to_rounding() -> None:
    gradients = [torch.randn(2**22, generator=torch.Generator().manual_seed(0)), torch.full((3,), 7.0)]
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert float(_sum_of_squares(gradients, torch.device("cpu"))) == pytest.approx(exact, rel=1e-12)
    in_float32 = float(torch.stack(torch._foreach_norm(gradients)).double().square().sum())
    assert abs(in_float32 / exact - 1) > 1e-5  # what the promise of 1e-5 would have lost


def test_a_rank_without_gradients_adds_nothing() -> None:
    assert float(_sum_of_squares([], torch.device("cpu"))) == 0.0


def test_the_norm_is_taken_block_by_block_of_any_shape() -> None:
    """Memory holds one block at a time: gradients end inside a block, at its edge and after it; one is strided."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(_BLOCK,), (_BLOCK + 1,), (3, _BLOCK - 1), (5, 7), (0,)]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients += [torch.randn(300, 400, generator=generator).t(), torch.tensor([1e25, 1e-30])]
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert float(_sum_of_squares(gradients, torch.device("cpu"))) == pytest.approx(exact, rel=1e-12)
    with torch.profiler.profile(profile_memory=True) as watched:
        _sum_of_squares(gradients[:3], torch.device("cpu"))
    largest = max(event.cpu_memory_usage for event in watched.events())
    assert largest < 2 * _BLOCK * 8
