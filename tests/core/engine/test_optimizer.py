"""The gradient norm of large tensors, and Adams that count updates by group of parameters."""

from pathlib import Path

import pytest
import torch

from mtrain.arch.layout import Layout
from mtrain.core.engine.optimizer import BLOCK, _sum_of_squares
from tests.core.engine import fused_adam_ranks
from tests.core.state.test_save_and_load import TIED, assert_same_standing, configured
from tests.pool import Pool


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
    shapes = [(BLOCK,), (BLOCK + 1,), (3, BLOCK - 1), (5, 7), (0,)]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients += [torch.randn(300, 400, generator=generator).t(), torch.tensor([1e25, 1e-30])]
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert float(_sum_of_squares(gradients, torch.device("cpu"))) == pytest.approx(exact, rel=1e-12)
    with torch.profiler.profile(profile_memory=True) as watched:
        _sum_of_squares(gradients[:3], torch.device("cpu"))
    largest = max(event.cpu_memory_usage for event in watched.events())
    assert largest < 2 * BLOCK * 8


def test_resuming_is_exact_with_an_adam_that_counts_by_group(pool: Pool, tmp_path: Path) -> None:
    """Ranks that hold nothing of a group skip its count: here one rank holds only a part of the table, no norm."""
    layout, config = Layout(dp=2), configured(**TIED, **{"model.num_layers": 1, "model.vocab_size": 800})
    straight = pool.run(fused_adam_ranks.train, layout, config, tmp_path, None, 4, 2)
    resumed = pool.run(fused_adam_ranks.train, layout, config, tmp_path, 2, 4, 3)
    assert {holds_nothing for _, holds_nothing in straight} == {False, True}
    for (one, _), (other, _) in zip(straight, resumed):
        assert one.saved is not None
        assert_same_standing(one.saved, other.begin)
        assert one.steps[2:] == other.steps
        assert_same_standing(one.end, other.end)
        assert (other.begin.adam_step, other.end.adam_step) == (2, 4)
