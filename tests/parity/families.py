"""Small models of families whose layers differ from Llama's, as sections of a configuration."""

from __future__ import annotations

from typing import Any

GEMMA: dict[str, Any] = {
    "model__norm_epsilon": 1e-6,
    "model__zero_centered_norm": True,
    "model__sandwich_norm": True,
    "model__activation": "geglu_tanh",
    "model__qk_norm": True,
    "model__head_dim": 16,
    "model__query_scalar": 40.0,
    "model__tied_embeddings": True,
    "model__scale_embeddings": True,
    "model__sliding_window": 7,
    "model__global_attention_every": 3,
    "model__rope": {"base": 3000.0, "local_base": 100.0, "scaling": "linear", "factor": 4.0},
}
"""Gemma-3's text model, with every third layer global."""

OLMO2: dict[str, Any] = {
    "model__norm_epsilon": 1e-6,
    "model__post_norm": True,
    "model__qk_norm": True,
    "model__qk_norm_width": "full",
    "model__head_dim": 6,
    "model__rope": {"base": 500.0},
}
"""OLMo-2 with grouped heads, whose sizes do not add up to the hidden size."""

OLMO3: dict[str, Any] = OLMO2 | {
    "model__sliding_window": 7,
    "model__global_attention_every": 4,
    "model__rope": {
        "base": 500.0,
        "local_base": 100.0,
        "scaling": "yarn",
        "factor": 4.0,
        "original_max_positions": 16,
        "beta_fast": 4.0,
    },
}
"""yarn in layers without a window alone, which multiplies their scores too."""

MINIMAX: dict[str, Any] = OLMO2 | {
    "model__post_norm": False,
    "model__head_dim": 16,
    "model__rope": {"base": 300.0, "partial": 0.375},
    "model__experts": {
        "num_experts": 8,
        "top_k": 3,
        "ffn_hidden_size": 24,
        "score": "sigmoid",
        "expert_bias": True,
    },
}
"""MiniMax-M2: 6 of a head's 16 dimensions rotate."""

MINISTRAL: dict[str, Any] = {
    "model__head_dim": 8,
    "model__rope": {
        "base": 300.0,
        "scaling": "yarn",
        "factor": 4.0,
        "original_max_positions": 5,
        "beta_fast": 4.0,
        "attention_temperature": 0.3,
    },
}
"""Ministral 3, whose queries grow with every fifth position."""

PARTIAL: dict[str, Any] = {"model__head_dim": 8, "model__rope": {"base": 300.0, "partial": 0.5}}
"""Llama with heads that rotate in half: queries, keys and values are split and rotated in one pass."""

GATED: dict[str, Any] = {
    "model__attention_gate": True,
    "model__qkv_bias": True,
    "model__qk_norm": True,
    "model__zero_centered_norm": True,
    "model__head_dim": 8,
    "model__rope": {"base": 300.0, "partial": 0.25},
}
"""Attention as in Qwen3-Next's full layers, with biases."""

HYBRID: dict[str, Any] = {
    "model__delta_net": {
        "num_key_heads": 4,
        "num_value_heads": 8,
        "key_head_dim": 6,
        "value_head_dim": 5,
        "conv_kernel": 3,
        "full_attention_every": 2,
    },
    "model__attention_gate": True,
    "model__qk_norm": True,
    "model__zero_centered_norm": True,
    "model__head_dim": 8,
    "model__rope": {"base": 300.0, "partial": 0.25},
}
"""Qwen3-Next without experts, every second layer with attention."""

MAMBA: dict[str, Any] = {
    "model__mamba": {"num_heads": 8, "head_dim": 5, "num_groups": 4, "state_dim": 6, "conv_kernel": 3, "step_min": 0.6},
    "model__layer_pattern": "M*-M",
    "model__activation": "relu2",
    "model__head_dim": 8,
    "model__megatron": {"no_rope_freq": 1},
}
"""Nemotron-H without experts; some steps are the smallest."""

NEMOTRON: dict[str, Any] = MAMBA | {
    "model__layer_pattern": "ME*E",
    "model__experts": {
        "num_experts": 4,
        "top_k": 2,
        "ffn_hidden_size": 24,
        "shared_ffn_hidden_size": 20,
        "score": "sigmoid",
        "expert_bias": True,
        "scaling_factor": 1.5,
    },
}
"""Nemotron 3: experts in the place of dense networks."""

GEMMA4: dict[str, Any] = {
    "model__sandwich_norm": True,
    "model__activation": "geglu_tanh",
    "model__qk_norm": True,
    "model__value_norm": True,
    "model__layer_scalar": True,
    "model__logit_softcap": 2.0,
    "model__head_dim": 8,
    "model__global_attention": {"head_dim": 12, "num_query_groups": 2},
    "model__query_scalar": 8.0,
    "model__tied_embeddings": True,
    "model__scale_embeddings": True,
    "model__sliding_window": 7,
    "model__global_attention_every": 2,
    "model__rope": {"base": 3000.0, "local_base": 100.0, "scaling": "proportional", "partial": 0.34},
}
"""Gemma 4 without experts: of six pairs of a wide head two are rotated. Scores are divided, which Gemma 4 leaves to the
weights of its norms: with those of tests a softmax would be so steep that float32 had fewer digits."""

GEMMA4_EXPERTS: dict[str, Any] = GEMMA4 | {
    "model__experts": {
        "num_experts": 8,
        "top_k": 3,
        "ffn_hidden_size": 24,
        "shared_ffn_hidden_size": 48,
        "branch_norms": True,
    },
}

GPT_OSS: dict[str, Any] = {
    "model__linear_bias": True,
    "model__activation": "swiglu_clamped",
    "model__attention_sinks": True,
    "model__head_dim": 6,
    "model__sliding_window": 5,
    "model__global_attention_every": 2,
    "model__rope": {
        "base": 300.0,
        "scaling": "yarn",
        "factor": 4.0,
        "original_max_positions": 16,
        "beta_fast": 4.0,
        "truncate": False,
    },
    "model__experts": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "router_bias": True},
}
GPT_OSS_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
"""Rotations of GPT_OSS in the words of transformers."""

DEEPSEEK_ATTENTION: dict[str, Any] = {
    "model__num_query_groups": None,
    "model__mla": {
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
    },
    "model__rope": {
        "base": 300.0,
        "scaling": "yarn",
        "factor": 4.0,
        "original_max_positions": 16,
        "beta_fast": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "interleaved": True,
    },
}
"""DeepSeek-V3 without experts."""
