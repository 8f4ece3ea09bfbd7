"""Faults of megatron-core 0.16.1 in layers of experts: each shown in plain Megatron-Core, and absent here."""

from typing import Any

import numpy as np
import pytest

from mtrain.arch.layout import Layout
from tests.core.state import expert_ranks as state_ranks
from tests.core.state.test_save_and_load import FP16, configured
from tests.known_issues import expert_ranks
from tests.pool import Pool


def distance(found: Any, exact: Any) -> float:
    """Returns largest difference / largest element."""
    return float(np.abs(found - exact).max() / np.abs(exact).max())


def test_their_router_needs_transformer_engine(pool: Pool) -> None:
    (said,) = pool.run(expert_ranks.their_router_fails, Layout())
    assert "te_general_gemm" in said


def test_their_scores_are_float32_in_a_float64_model(pool: Pool) -> None:
    ((theirs, ours),) = pool.run(expert_ranks.scores_in_float64, Layout())
    assert theirs > 1e-9
    assert ours < 1e-15


def test_gradients_of_experts_miss_their_sum_over_tp(pool: Pool) -> None:
    """Has ep = 1, etp = 1, tp = 2: each rank has all experts and half of the sequence."""
    (whole,) = pool.run(expert_ranks.layer_run, Layout(), True)
    for is_ours in (False, True):
        runs = pool.run(expert_ranks.layer_run, Layout(tp=2, sp=True), is_ours)
        for name, exact in whole.gradients.items():
            found = [run.gradients[name] for run in runs]
            if is_ours:
                assert all(distance(each, exact) < 1e-5 for each in found), name
            else:
                assert all(distance(each, exact) > 0.1 for each in found), name
                assert distance(sum(found), exact) < 1e-5


def test_gradients_of_biases_of_several_experts_are_added(pool: Pool) -> None:
    """Has ep = 2 over the two ranks of tp = 2: biases of different experts count as replicas of one."""
    (whole,) = pool.run(expert_ranks.layer_run, Layout(), True, True)
    for is_ours in (False, True):
        runs = pool.run(expert_ranks.layer_run, Layout(tp=2, sp=True, ep=2), is_ours, True)
        for name, exact in whole.gradients.items():
            is_wrong = name == "linear_fc2.bias" and not is_ours
            found = distance(np.concatenate([run.gradients[name] for run in runs]), exact)
            assert (found > 0.1) if is_wrong else (found < 1e-5), (name, is_ours)


def test_experts_miss_in_the_norm(pool: Pool) -> None:
    """Has weights without a mark, as they are without their initialisation: tensor-parallel rank 1 does not count
    them."""
    (whole,) = pool.run(expert_ranks.layer_run, Layout(), True)
    missing = sum(np.square(each[2:]).sum() for each in whole.gradients.values())
    assert missing > 0.01 * whole.norm**2
    for is_ours, square in ((False, whole.norm**2 - missing), (True, whole.norm**2)):
        for run in pool.run(expert_ranks.layer_run, Layout(tp=2, sp=True, ep=2), is_ours, False, False):
            assert run.norm**2 == pytest.approx(square, rel=1e-5)


def test_split_sizes_stay_tensors_on_cpus(pool: Pool) -> None:
    for rank, (said, received) in enumerate(pool.run(expert_ranks.split_sizes, Layout(dp=2))):
        assert "all_to_all_single" in said or "incompatible" in said, said
        assert received == [rank, 10 + rank]


def test_lists_of_several_sizes_travel_on_gloo(pool: Pool) -> None:
    for rank, (gathered, scattered) in enumerate(pool.run(expert_ranks.uneven_lists, Layout(dp=3))):
        assert gathered == [0, 1, 1, 2, 2, 2]
        assert scattered == [3 * (rank + 1)] * (rank + 1)


def test_their_checkpoint_keys_of_expert_layers_are_dense_ones(pool: Pool) -> None:
    """Compares with TransformerEngine's pre_mlp_layernorm.weight; for ours see mcore/state/test_expert_state.py."""
    (keys,) = pool.run(expert_ranks.their_keys, Layout())
    assert "mlp.linear_fc1.layer_norm_weight" in keys
    assert "pre_mlp_layernorm.weight" not in keys


def test_loss_scales_part_when_experts_overflow(pool: Pool) -> None:
    for theirs in pool.run(expert_ranks.loss_scales, Layout(dp=2, ep=2)):
        assert theirs == [1024.0, 512.0]
    config = configured(**{"model.experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}}, **FP16)
    for scales in pool.run(state_ranks.loss_scales_after_an_overflow, Layout(pp=2, dp=2, ep=2), config):
        assert len(scales) == 2
        assert scales == [scales[0]] * 2 == [2.0**20] * 2
