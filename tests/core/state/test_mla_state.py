"""The state of latent attention: initial weights and checkpoints, the same on every layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.arch.layout import Layout
from mtrain.checkpoint.format.safe_metadata import read_metadata
from mtrain.checkpoint.store.steps import step_name
from mtrain.config import Config
from tests.core.state import checkpoint_ranks
from tests.core.state.checkpoint_ranks import Outcome
from tests.core.state.test_save_and_load import BF16, assert_same_bits, assert_same_model, configured
from tests.pool import Pool

SIZES = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
SAVED = Layout(tp=2, sp=True)
KEYS = {
    "input_layernorm.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attention.linear_kv_up_proj.weight",
    "self_attention.linear_proj.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
}
"""Keys of a layer, as megatron-core's TransformerEngine layers have them."""


def latent(q_lora_rank: int | None, **changes: Any) -> Config:
    """Returns the small model of the checkpoint tests, with latent attention."""
    plain = {"model.num_query_groups": None, "model.qk_norm": False, "model.qkv_bias": False}
    return configured(**plain, **{"model.mla": {**SIZES, "q_lora_rank": q_lora_rank}}, **changes)


# main weights of bf16 on other layouts: test_save_and_load.py
@pytest.fixture(scope="module", params=[{}, pytest.param(BF16, marks=pytest.mark.nightly)], ids=["fp32", "bf16"])
def straight(request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a run on tp2sp that saved after a step and made two more: (configuration, its folder, rank 0)."""
    config, folder = latent(8, **request.param), tmp_path_factory.mktemp("latent")
    return config, folder, pool.run(checkpoint_ranks.train, SAVED, config, folder, None, 3, 1, ["begin", "save"])[0]


@pytest.mark.parametrize(  # pp = 2 makes the halves of tp whole as well; four parts: test_save_and_load.py
    "layout",
    [Layout(pp=2), *(pytest.param(each, marks=pytest.mark.nightly) for each in (Layout(dp=2), Layout(tp=4)))],
    ids=str,
)
def test_another_layout_starts_saves_and_trains_alike(pool: Pool, straight: Any, layout: Layout) -> None:
    config, folder, whole = straight
    fresh, resumed = pool.run(checkpoint_ranks.begin_and_resume, layout, config, folder, 3, 1)[0]
    assert resumed.begin.adam_step == 1
    assert_same_model(whole.whole["save"], resumed.whole["begin"])
    if config.train.precision == "fp32":
        for one, other in zip(whole.steps[1:], resumed.steps, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5)
    assert_same_model(whole.whole["begin"], fresh.whole["begin"])


def test_the_keys_are_megatrons(straight: Any) -> None:
    _, folder, _ = straight
    keys = read_metadata(folder / step_name(1)).tensors
    prefix = "decoder.layers."
    assert {key.removeprefix(prefix) for key in keys if key.startswith(prefix)} == KEYS


@pytest.mark.nightly  # a plain projection, which travels as in test_save_and_load.py
def test_direct_queries_travel_as_well(pool: Pool, tmp_path: Path) -> None:
    config = latent(None)
    saved: Outcome = pool.run(checkpoint_ranks.train, Layout(tp=2), config, tmp_path, None, 1, 1, ["save"])[0]
    loaded: Outcome = pool.run(checkpoint_ranks.train, Layout(pp=2), config, tmp_path, 1, 1, None, ["begin"])[0]
    assert_same_model(saved.whole["save"], loaded.whole["begin"])
    assert_same_bits(saved.whole["save"].main, loaded.whole["begin"].parameters)
