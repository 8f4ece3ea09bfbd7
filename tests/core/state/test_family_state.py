"""The state of families: checkpoints, the same on every layout, under names of Megatron-Core and Megatron-Bridge."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.arch.layout import Layout
from mtrain.checkpoint.format.safe_metadata import read_metadata
from mtrain.checkpoint.store.steps import step_name
from tests.config.test_vision import VISION
from tests.core.state import checkpoint_ranks
from tests.core.state.checkpoint_ranks import Outcome
from tests.core.state.test_save_and_load import assert_same_model, configured
from tests.parity.families import GEMMA, GEMMA4, GEMMA4_EXPERTS, GPT_OSS, HYBRID, OLMO2
from tests.pool import Pool

FAMILIES: dict[str, tuple[dict[str, Any], Layout, Layout, set[str]]] = {
    "gemma": (
        GEMMA,
        Layout(tp=2, sp=True),
        Layout(pp=2),
        {"self_attention.linear_proj.post_layernorm.weight", "mlp.linear_fc2.post_layernorm.weight"},
    ),
    "gemma4": (
        GEMMA4 | {"model__qkv_bias": False},
        Layout(tp=2, sp=True),
        Layout(pp=2),
        {
            "0.scalar",
            "0.self_attention.linear_proj.post_layernorm.weight",
            "0.mlp.linear_fc2.post_layernorm.weight",
            "0.self_attention.linear_qkv.layer_norm_weight",
            "1.self_attention.linear_qk.weight",
            "1.input_layernorm.weight",
        },
    ),
    "gemma4 with experts": (
        GEMMA4_EXPERTS | {"model__qkv_bias": False},
        Layout(tp=2, sp=True, ep=2),
        Layout(pp=2),
        {
            "0.mlp.shared_input_norm.weight",
            "0.mlp.shared_output_norm.weight",
            "0.mlp.routed_input_norm.weight",
            "1.mlp.routed_output_norm.weight",
            "1.mlp.router.scale",
            "1.mlp.router.per_expert_scale",
            "1.mlp.linear_fc2.post_layernorm.weight",
        },
    ),
    "olmo2": (
        OLMO2,
        Layout(pp=2),
        Layout(tp=2),
        {
            "self_attention.q_layernorm.weight",
            "self_attention.k_layernorm.weight",
            "self_attention.linear_proj.post_layernorm.weight",
            "mlp.linear_fc2.post_layernorm.weight",
        },
    ),
    "gpt_oss": (
        GPT_OSS | {"model__qk_norm": False},
        Layout(tp=2, sp=True, ep=2),
        Layout(pp=2),
        {"self_attention.core_attention.softmax_offset", "mlp.router.bias"},
    ),
    "hybrid": (
        HYBRID,
        Layout(tp=2, sp=True),
        Layout(pp=2),
        {
            "0.self_attention.in_proj.weight",
            "0.self_attention.conv1d.weight",
            "0.self_attention.A_log",
            "0.self_attention.dt_bias",
            "0.self_attention.out_norm.weight",
            "0.self_attention.out_proj.weight",
            "0.input_layernorm.weight",
            "1.self_attention.linear_qkv.layer_norm_weight",
        },
    ),
    "a tower of which the projector learns": (
        {"model__vision": VISION | {"hidden_size": 24, "freeze_projector": False}},
        Layout(tp=2, sp=True),
        Layout(pp=2),
        {"mlp.linear_fc2.weight"},
    ),
    "a projector that learns alone": (
        {"model__vision": VISION | {"hidden_size": 24, "freeze_projector": False, "freeze_language_model": True}},
        Layout(tp=2, sp=True, dp=2),
        Layout(pp=2),
        {"mlp.linear_fc2.weight"},
    ),
}


BY_NIGHT = ("gemma", "gemma4", "olmo2", "hybrid")
"""Gemma 4 with experts has the norms of the first two. Those over whole heads, and delta nets, travel alike; their
names are compared for the checkpoints of tests/convert."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[pytest.mark.nightly] if each in BY_NIGHT else []) for each in FAMILIES],
)
def test_another_layout_loads_and_trains_alike(pool: Pool, tmp_path: Path, family: str) -> None:
    knobs, first, second, keys = FAMILIES[family]
    config = configured(**{name.replace("__", "."): value for name, value in knobs.items()})
    saved: Outcome = pool.run(checkpoint_ranks.train, first, config, tmp_path, None, 3, 1, ["save"])[0]
    loaded: Outcome = pool.run(checkpoint_ranks.train, second, config, tmp_path, 1, 3, None, ["begin"])[0]
    assert_same_model(saved.whole["save"], loaded.whole["begin"])
    for one, other in zip(saved.steps[1:], loaded.steps, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5)
    found = read_metadata(tmp_path / step_name(1)).tensors
    assert {f"decoder.layers.{key}" for key in keys} <= set(found)
