"""Models of transformers with a gated delta net or Mamba-2 in most layers, small, each with our section of the same
architecture."""

from typing import Any

import transformers

from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.rope import RopeSection
from tests.verify.reference.dense_models import SMALL, common

NET = {
    "num_key_heads": 2,
    "num_value_heads": 6,
    "key_head_dim": 6,
    "value_head_dim": 5,
    "conv_kernel": 3,
    "full_attention_every": 2,
}
EXPERTS = {"num_experts": 6, "top_k": 3, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 40, "shared_gate": True}


def qwen3_next() -> tuple[ModelSection, Any]:
    """4 of a head's 16 dimensions rotate; three value heads share a key."""
    return _section(experts=EXPERTS), transformers.Qwen3NextConfig(
        **_common(),
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
    )


def qwen3_5() -> tuple[ModelSection, Any]:
    """Qwen3-Next's layers with dense networks, and with four projections in the place of two."""
    return _section(), transformers.Qwen3_5TextConfig(**_common())


def nemotron_h() -> tuple[ModelSection, Any]:
    """Every kind of sublayer; groups of two heads, and steps of which a part is the smallest."""
    sizes = {**SMALL, "num_layers": 5}
    section = ModelSection(
        **sizes,
        head_dim=16,
        activation="relu2",
        layer_pattern="ME*-M",
        megatron={"no_rope_freq": 1},
        mamba={"num_heads": 4, "head_dim": 5, "num_groups": 2, "state_dim": 6, "conv_kernel": 3, "step_min": 0.6},
        experts={
            "num_experts": 6,
            "top_k": 3,
            "ffn_hidden_size": 24,
            "shared_ffn_hidden_size": 40,
            "score": "sigmoid",
            "expert_bias": True,
            "scaling_factor": 1.5,
        },
    )
    given = common(ModelSection(**sizes))
    return section, transformers.NemotronHConfig(
        **{name: value for name, value in given.items() if name not in ("hidden_act", "rms_norm_eps")},
        head_dim=16,
        layer_norm_epsilon=section.norm_epsilon,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        mamba_num_heads=4,
        mamba_head_dim=5,
        n_groups=2,
        ssm_state_size=6,
        conv_kernel=3,
        time_step_min=0.6,
        chunk_size=7,
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
        routed_scaling_factor=1.5,
    )


def _section(**further: Any) -> ModelSection:
    return ModelSection(
        **SMALL,
        head_dim=16,
        qk_norm=True,
        zero_centered_norm=True,
        attention_gate=True,
        rope=RopeSection(base=500.0, partial=0.25),
        delta_net=NET,
        **further,
    )


def _common() -> dict[str, Any]:
    return {
        **common(ModelSection(**SMALL)),
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
