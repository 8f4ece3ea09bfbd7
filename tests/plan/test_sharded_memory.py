"""The memory of divided weights, compared with what their ranks hold."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain import arch
from mtrain.arch.layout import Layout
from tests.config.samples import config
from tests.parity.expert_models import DEEPSEEK, MIXTRAL
from tests.parity.families import DEEPSEEK_ATTENTION, HYBRID
from tests.plan.memory_ranks import states
from tests.plan.test_memory_of_families import WIDE
from tests.pool import Pool

BF16 = {"train__precision": "bf16"}
TIED = {"model__tied_embeddings": True}
STAGES = {"model__num_layers": 4, "train__global_batch_size": 8, "data": {"kind": "mock", "seq_length": 64}}
TOWER = {
    "num_layers": 3,
    "hidden_size": 256,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 2,
    "patch_size": 4,
    "num_positions": 16,
    "rope_sections": (4, 2, 2),
    "image_token": 5,
    "freeze_tower": False,
    "freeze_projector": False,
}
"""Wider than a layer of the language model and its tables."""
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "dense": (Layout(dp=2), {}),
    "dense, dp4": (Layout(dp=4), {"train__global_batch_size": 8}),
    "bf16": (Layout(dp=2), BF16),
    "tied": (Layout(dp=2), TIED | BF16),
    "rows that do not divide": (Layout(dp=3), {"model__hidden_size": 112, "train__global_batch_size": 6}),
    "tp": (Layout(tp=2, sp=True, dp=2), {}),
    "cp": (Layout(cp=2, dp=2), {}),
    "pp": (Layout(pp=2, dp=2), STAGES),
    "pp, tied": (Layout(pp=2, dp=2), STAGES | TIED),
    "experts": (Layout(dp=4, ep=2), MIXTRAL),
    "fewer experts than ranks": (Layout(dp=3), MIXTRAL | {"train__global_batch_size": 6}),
    "deepseek": (Layout(dp=2), DEEPSEEK | DEEPSEEK_ATTENTION | {"model__mtp_depths": 1}),
    "hybrid": (Layout(dp=2), HYBRID | BF16),
    "tower": (Layout(dp=2), {"model__vision": TOWER}),
    "recomputed": (Layout(dp=2), {"train__recompute": "full"}),
}


def given(layout: Layout, changes: dict[str, Any]) -> Any:
    degrees = {f"layout__{axis}": getattr(layout, axis) for axis in ("tp", "sp", "pp", "cp", "ep")}
    return config(**{"train__precision": "fp32", **WIDE, **degrees, **changes, "layout__shard": "weights"})


BY_DAY = ("tied", "tower", "tp", "pp, tied", "experts", "fewer experts than ranks")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DAY else [pytest.mark.nightly]) for name in CASES]
)
def test_what_a_rank_holds(name: str, pool: Pool) -> None:
    layout, changes = CASES[name]
    one = given(layout, changes)
    layout = Layout.from_config(one, layout.world_size)
    for rank, (found,) in enumerate(pool.run(states, layout, [one])):
        estimate = arch.memory_per_rank(one, layout, layout.coordinate(rank).pp)
        state = (estimate.weights_bytes, estimate.gradients_bytes, estimate.optimizer_bytes)
        assert (found.weights, found.gradients) == pytest.approx(state[:2], rel=5e-3)
        # a rank without rows of a parameter has no moments of it
        assert found.optimizer <= 1.005 * estimate.optimizer_bytes
        assert found.alive == pytest.approx(sum((found.weights, found.gradients, found.optimizer)), rel=0.02)
        assert found.alive <= 1.02 * sum(state)
        most = found.weights + found.optimizer + found.forward_backward_peak
        assert most == pytest.approx(estimate.total_bytes, rel=0.1)
