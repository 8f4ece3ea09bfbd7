"""Rules of model.vision: unsupported features are refused by name."""

from typing import Any

import pytest

from mtrain.plan.summary import plan_lines
from tests.config.samples import config
from tests.config.test_rules import messages
from tests.messages import check_message

VISION: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 2,
    "patch_size": 4,
    "num_positions": 16,
    "rope_sections": (2, 1, 1),
    "image_token": 5,
}
GEMMA3: dict[str, Any] = {name: value for name, value in VISION.items() if name != "rope_sections"} | {
    "kind": "gemma3",
    "frames_per_patch": 1,
}
MISTRAL3: dict[str, Any] = GEMMA3 | {"kind": "mistral3", "num_positions": 1, "activation": "silu"}
GEMMA4: dict[str, Any] = GEMMA3 | {"kind": "gemma4"}
WIDE_HEADS: dict[str, Any] = {
    "model__global_attention": {"head_dim": 16, "num_query_groups": 2},
    "model__sliding_window": 8,
    "model__global_attention_every": 2,
    "model__rope": {"base": 3000.0, "local_base": 100.0},
}
TRAINED = {"freeze_tower": False}
ALONE = {"freeze_language_model": True}
BALANCED = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "expert_bias": True, "bias_update_rate": 0.001}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
LORA = {"kind": "lora", "rank": 2, "targets": ["proj"]}
UNABLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "train.overlap_param_gather=true": (
        {"train__overlap_param_gather": True, "train__overlap_grad_reduce": True},
        {"freeze_projector": False},
    ),
    "model.backend=te": ({"model__backend": "te"}, {}),
    "train.fp8=hybrid with model.vision": ({"train__fp8": "hybrid"}, {}),
    "sliding_window": ({"model__sliding_window": 8}, {}),
    "num_labels=1": ({"model__num_labels": 1, "loss__function": "reward"}, {}),
    "vision.image_token=1000": ({}, {"image_token": 1000}),
    "vision.rope_sections=[2, 2, 1]": ({}, {"rope_sections": (2, 2, 1)}),
    "leaves nothing to train": ({}, ALONE),
    "adapter.modules_to_save=['norms']": ({"adapter": LORA | {"modules_to_save": ["norms"]}}, ALONE),
    "modules_to_save: names visual.merger": ({"adapter": LORA | {"modules_to_save": ["norm", "visual.merger"]}}, {}),
    "targets: names visual.blocks": ({"adapter": LORA | {"targets": ["qkv", "visual.blocks.0.attn.qkv"]}}, {}),
    "bias_update_rate=0.001": (
        {"model__experts": BALANCED, "loss__allow_layout_dependent": True},
        ALONE | {"freeze_projector": False},
    ),
    "optimizer.tower_lr=0.001 has no effect": ({"optimizer__tower_lr": 1e-3}, {"freeze_projector": False}),
    "optimizer.projector_lr=0.001 has no effect": ({"optimizer__projector_lr": 1e-3}, TRAINED),
    "tower_lr=1e+38 gives factors": ({"optimizer__tower_lr": 1e38}, TRAINED),
    "the first pipeline stage has 1": ({"layout__pp": 8}, {"deepstack": (0, 1)}),
    "deepstack=[1, 0]": ({}, {"deepstack": (1, 0)}),
    "hidden_size=20": ({}, {"hidden_size": 20}),
    "num_positions=15": ({}, {"num_positions": 15}),
    "rope_sections is missing": ({}, {"rope_sections": None}),
}
NETS = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8, "full_attention_every": 2}
UNABLE_WITH_GEMMA3: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mtp_depths=1": ({"model__mtp_depths": 1}, {}),
    "layout.cp_comm=ring": ({"layout__cp": 2, "layout__cp_comm": "ring"}, {}),
    "delta_net": ({"model__delta_net": NETS}, {}),
    "global_attention cannot": (WIDE_HEADS, {}),
    "frames_per_patch=2": ({}, {"frames_per_patch": 2}),
    "rope_sections=[2, 1, 1]": ({}, {"rope_sections": (2, 1, 1)}),
    "deepstack=[0]": ({}, {"deepstack": (0,)}),
    "hidden_size=17": ({}, {"hidden_size": 17}),
    "merge_size=3": ({}, {"merge_size": 3}),
    "standardize=true": ({}, {"standardize": True}),
}


def test_a_tower_needs_nothing_else() -> None:
    assert config(model__vision=VISION).model.vision is not None
    for trained in ({}, TRAINED):
        assert config(model__vision=VISION | trained, adapter=LORA).adapter is not None
        assert config(model__vision=VISION | trained, optimizer__kind="muon").model.vision is not None
    rates = {"adapter": LORA | {"modules_to_save": ["norms"]}, "optimizer__tower_lr": 1e-5}
    assert config(model__vision=VISION | TRAINED, **rates).optimizer.tower_lr == 1e-5
    assert config(model__vision=VISION | ALONE, adapter=LORA).model.has_frozen_language_model
    assert config(model__vision=VISION | ALONE | TRAINED).model.has_frozen_language_model
    assert config(model__vision=VISION, model__mtp_depths=1, train__offload_layers=1).model.layers_ahead
    assert config(model__vision=VISION | {"deepstack": (0, 1)}, train__recompute="full").train.recompute == "full"


def test_a_rate_of_a_tower_needs_a_tower(tmp_path: Any) -> None:
    (found,) = messages(tmp_path, optimizer__tower_lr=1e-3)
    check_message(found)
    assert "optimizer.tower_lr=0.001 is for a model with model.vision" in found


def test_the_plan_names_each_learning_rate() -> None:
    rates = {"optimizer__tower_lr": 1e-5, "optimizer__projector_lr": 2e-4}
    own = config(model__vision=VISION | TRAINED | {"freeze_projector": False}, **rates)
    (line,) = [line for line in plan_lines(own, 1) if line.startswith("learning rates")]
    assert line.split(None, 2)[2] == "lr=0.001, tower_lr=1e-05, projector_lr=0.0002"


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("num_positions=16", {"num_positions": 16}),
        ("frames_per_patch=2", {"frames_per_patch": 2}),
        ("rope_sections=[2, 1, 1]", {"rope_sections": (2, 1, 1)}),
        ("deepstack=[0]", {"deepstack": (0,)}),
        ("hidden_size=12", {"hidden_size": 12}),
    ],
)
def test_what_mistral_3_does_not_have_is_refused_by_name(tmp_path: Any, named: str, changes: dict[str, Any]) -> None:
    assert config(model__vision=MISTRAL3, model__sliding_window=8).model.vision is not None
    (found,) = [line for line in messages(tmp_path, model__vision=MISTRAL3 | changes) if named in line]
    check_message(found)


@pytest.mark.parametrize("name", UNABLE)
def test_what_does_not_run_with_a_tower_is_refused_by_name(tmp_path: Any, name: str) -> None:
    changes, vision = UNABLE[name]
    (found,) = [line for line in messages(tmp_path, model__vision=VISION | vision, **changes) if name in line]
    check_message(found)


def test_gemma_3_has_windows() -> None:
    assert config(model__vision=GEMMA3, model__sliding_window=8).model.vision is not None


@pytest.mark.parametrize("name", UNABLE_WITH_GEMMA3)
def test_what_does_not_run_with_images_that_see_themselves_is_refused_by_name(tmp_path: Any, name: str) -> None:
    changes, vision = UNABLE_WITH_GEMMA3[name]
    (found,) = [line for line in messages(tmp_path, model__vision=GEMMA3 | vision, **changes) if name in line]
    check_message(found)


@pytest.mark.parametrize(
    ("named", "changes", "vision"),
    [
        ("needs global_attention", {"model__global_attention": None}, {}),
        ("images whose tokens see", {"layout__cp": 2, "layout__cp_comm": "ring"}, {}),
        ("rope_sections=[2, 1, 1]", {}, {"rope_sections": (2, 1, 1)}),
        ("hidden_size=12", {}, {"hidden_size": 12}),
        ("num_channels=1", {}, {"num_channels": 1}),
    ],
)
def test_what_does_not_run_with_gemma_4_is_refused_by_name(
    tmp_path: Any, named: str, changes: dict[str, Any], vision: dict[str, Any]
) -> None:
    assert config(model__vision=GEMMA4 | {"standardize": True}, **WIDE_HEADS).model.has_bidirectional_images
    (found,) = [
        line for line in messages(tmp_path, model__vision=GEMMA4 | vision, **WIDE_HEADS | changes) if named in line
    ]
    check_message(found)
