"""The memory estimate of families and schedules, compared with what their ranks allocate."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain import arch
from mtrain.arch.layout import Layout
from tests.config.samples import config
from tests.config.test_vision import VISION
from tests.parity.expert_models import DEEPSEEK, MIXTRAL, with_experts
from tests.parity.families import DEEPSEEK_ATTENTION, GATED, GEMMA, HYBRID, OLMO2
from tests.plan.memory_ranks import measured
from tests.pool import Pool

WIDE: dict[str, Any] = {
    "model__hidden_size": 128,
    "model__ffn_hidden_size": 384,
    "model__num_layers": 2,
    "model__vocab_size": 2048,
    "train__device": "cpu",
    "train__global_batch_size": 4,
    "data": {"kind": "mock", "seq_length": 128},
}
TOWER_ALONE = VISION | {
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "rope_sections": (4, 2, 2),
    "freeze_tower": False,
    "freeze_projector": False,
    "freeze_language_model": True,
}
PADDED: dict[str, Any] = {
    **with_experts(MIXTRAL, capacity_factor=4.0),
    "model__vocab_size": 256,
    "data": {"kind": "mock", "seq_length": 512},
    "loss__allow_layout_dependent": True,
}
"""Experts whose rows take most memory."""
OFF = {"train__distributed_optimizer": False}
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "gemma": (Layout(), GEMMA),
    "olmo2": (Layout(dp=2), OLMO2),
    "gated attention": (Layout(), GATED),
    "hybrid": (Layout(), HYBRID),
    "hybrid, bf16": (Layout(), HYBRID | {"train__precision": "bf16"}),
    "hybrid, recomputed": (Layout(), HYBRID | {"train__recompute": "selective"}),
    "mixtral": (Layout(dp=2, ep=2), MIXTRAL | {"layout": {"ep": 2}}),
    "mixtral with a capacity": (Layout(dp=2, ep=2), PADDED | {"layout": {"ep": 2}}),
    "deepseek": (Layout(), DEEPSEEK | DEEPSEEK_ATTENTION | {"model__mtp_depths": 1}),
    "interleaved": (Layout(pp=2, vpp=2), {"model__num_layers": 4, "layout": {"pp": 2, "vpp": 2}}),
    "a frozen language model": (Layout(pp=2, dp=2), {"layout__pp": 2, "model__vision": TOWER_ALONE}),
    "not distributed": (Layout(dp=2), OFF | {"train__precision": "bf16"}),
    "fp16": (Layout(dp=2), {"train__precision": "fp16"}),
}


# fp16 is like bf16 except for the loss scale, and slow on CPUs; experts are those of deepseek, stages those of
# test_memory.py, and the hybrid's layers are in two other rows
BY_NIGHT = ("fp16", "mixtral", "interleaved", "hybrid", "olmo2", "hybrid, bf16", "gemma", "gated attention")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in BY_NIGHT else []) for name in CASES]
)
def test_what_follows_from_parameters_is_exact_and_the_whole_within_a_tenth(name: str, pool: Pool) -> None:
    layout, changes = CASES[name]
    given = config(**{"train__precision": "fp32", **WIDE, **changes})
    for rank, (found,) in enumerate(pool.run(measured, layout, [given])):
        estimate = arch.memory_per_rank(given, layout, layout.coordinate(rank).pp)
        states = (estimate.weights_bytes, estimate.gradients_bytes, estimate.optimizer_bytes)
        assert (found.weights_bytes, found.gradients_bytes, found.optimizer_bytes) == pytest.approx(states, rel=1e-3)
        whole = sum(states) + max(found.forward_backward_bytes, found.update_bytes)
        assert estimate.total_bytes == pytest.approx(whole, rel=0.1)
