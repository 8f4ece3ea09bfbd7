"""Dense models of transformers, small, each with our section of the same architecture."""

from typing import Any

import transformers

from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.rope import RopeSection

SMALL = {
    "num_layers": 3,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 61,
    "norm_epsilon": 1e-6,
}


def llama(rope: RopeSection, **parameters: Any) -> tuple[ModelSection, Any]:
    model = ModelSection(**SMALL, rope=rope)
    return model, transformers.LlamaConfig(**common(model), rope_parameters=parameters | {"rope_theta": rope.base})


def common(model: ModelSection) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.norm_epsilon,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": model.tied_embeddings,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }


def llama3_rope() -> tuple[ModelSection, Any]:
    rope = RopeSection(base=500.0, scaling="llama3", factor=8.0, original_max_positions=64)
    return llama(
        rope,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )


def linear_rope() -> tuple[ModelSection, Any]:
    return llama(RopeSection(scaling="linear", factor=2.5), rope_type="linear", factor=2.5)


def yarn_rope() -> tuple[ModelSection, Any]:
    rope = RopeSection(
        base=300.0, scaling="yarn", factor=4.0, beta_fast=4.0, beta_slow=0.5, original_max_positions=32, truncate=False
    )
    return llama(
        rope,
        rope_type="yarn",
        factor=4.0,
        beta_fast=4.0,
        beta_slow=0.5,
        original_max_position_embeddings=32,
        truncate=False,
    )


def yarn_rope_rounded() -> tuple[ModelSection, Any]:
    rope = RopeSection(base=50.0, scaling="yarn", factor=3.0, original_max_positions=2048, attention_factor=1.25)
    return llama(rope, rope_type="yarn", factor=3.0, original_max_position_embeddings=2048, attention_factor=1.25)


def qwen2() -> tuple[ModelSection, Any]:
    model = ModelSection(**SMALL, qkv_bias=True, tied_embeddings=True, rope=RopeSection(base=1000000.0))
    rope_parameters = {"rope_type": "default", "rope_theta": 1000000.0}
    return model, transformers.Qwen2Config(**common(model), rope_parameters=rope_parameters)


def qwen3() -> tuple[ModelSection, Any]:
    model = ModelSection(**SMALL, qk_norm=True, head_dim=16, rope=RopeSection(base=1000000.0))
    rope_parameters = {"rope_type": "default", "rope_theta": 1000000.0}
    return model, transformers.Qwen3Config(**common(model), head_dim=16, rope_parameters=rope_parameters)


def qwen3_with_global_layers() -> tuple[ModelSection, Any]:
    model = ModelSection(**SMALL, qk_norm=True, sliding_window=5, global_attention_every=2)
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    return model, transformers.Qwen3Config(
        **common(model),
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        use_sliding_window=True,
        sliding_window=5,
        layer_types=layer_types,
    )


def mistral() -> tuple[ModelSection, Any]:
    model = ModelSection(**SMALL, sliding_window=7)
    rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    return model, transformers.MistralConfig(**common(model), sliding_window=7, rope_parameters=rope_parameters)


def ministral3() -> tuple[ModelSection, Any]:
    """Queries grow six times within 40 tokens."""
    rope = RopeSection(base=300.0, scaling="yarn", factor=4.0, original_max_positions=6, attention_temperature=0.3)
    model = ModelSection(**SMALL, head_dim=16, rope=rope)
    rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": 300.0,
        "factor": 4.0,
        "original_max_position_embeddings": 6,
        "llama_4_scaling_beta": 0.3,
    }
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return model, transformers.Ministral3Config(**common(model), **tokens, head_dim=16, rope_parameters=rope_parameters)


def starcoder2(activation: str = "gelu_tanh") -> tuple[ModelSection, Any]:
    model = ModelSection(**SMALL, norm="layernorm", activation=activation, linear_bias=True, sliding_window=9)
    return model, transformers.Starcoder2Config(
        **{key: value for key, value in common(model).items() if key != "rms_norm_eps"},
        norm_epsilon=model.norm_epsilon,
        hidden_act={"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}[activation],
        use_bias=True,
        sliding_window=9,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        embedding_dropout=0.0,
        residual_dropout=0.0,
        attention_dropout=0.0,
    )


def gemma3() -> tuple[ModelSection, Any]:
    rope = RopeSection(base=3000.0, local_base=100.0, scaling="linear", factor=4.0)
    model = ModelSection(
        **SMALL,
        zero_centered_norm=True,
        sandwich_norm=True,
        activation="geglu_tanh",
        qk_norm=True,
        head_dim=16,
        query_scalar=12.0,
        tied_embeddings=True,
        scale_embeddings=True,
        sliding_window=5,
        global_attention_every=3,
        rope=rope,
    )
    return model, transformers.Gemma3TextConfig(
        **common(model),
        head_dim=16,
        pad_token_id=None,  # the gradient of its row would be left out
        query_pre_attn_scalar=12,
        sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    )


def gemma4(experts: dict[str, Any] | None = None, **fields: Any) -> tuple[ModelSection, Any]:
    """Global layers have fewer and wider heads, of which an odd number of pairs is rotated."""
    rope = RopeSection(base=3000.0, local_base=100.0, scaling="proportional", partial=0.4, factor=2.0)
    model = ModelSection(
        **SMALL,
        sandwich_norm=True,
        activation="geglu_tanh",
        qk_norm=True,
        value_norm=True,
        layer_scalar=True,
        logit_softcap=3.0,
        head_dim=8,
        global_attention={"head_dim": 16, "num_query_groups": 1},
        query_scalar=1.0,
        tied_embeddings=True,
        scale_embeddings=True,
        sliding_window=5,
        global_attention_every=3,
        rope=rope,
        experts=experts,
    )
    return model, transformers.Gemma4TextConfig(
        **common(model),
        **fields,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=3.0,
        pad_token_id=None,
        sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 3000.0,
                "partial_rotary_factor": 0.4,
                "factor": 2.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    )


def olmo2() -> tuple[ModelSection, Any]:
    """Some heads are grouped; the heads' sizes do not add up to the hidden size."""
    rope = RopeSection(base=500.0)
    model = ModelSection(**SMALL, post_norm=True, qk_norm=True, qk_norm_width="full", head_dim=16, rope=rope)
    rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    own = {"head_dim": 16, "pad_token_id": None}  # the gradient of a padding token's row would be left out
    return model, transformers.Olmo2Config(**common(model), **own, rope_parameters=rope_parameters)


def olmo3() -> tuple[ModelSection, Any]:
    rope = RopeSection(
        base=500.0, local_base=100.0, scaling="yarn", factor=4.0, beta_fast=4.0, original_max_positions=16
    )
    model = ModelSection(
        **SMALL,
        post_norm=True,
        qk_norm=True,
        qk_norm_width="full",
        sliding_window=5,
        global_attention_every=3,
        rope=rope,
    )
    return model, transformers.Olmo3Config(
        **common(model),
        pad_token_id=None,
        sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 16,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    )


def starcoder2_exact_gelu() -> tuple[ModelSection, Any]:
    return starcoder2("gelu")


def smollm3(pattern: int | list[int] = 2, **own: Any) -> tuple[ModelSection, Any]:
    """Every second layer has no rotary positions."""
    model = ModelSection(**SMALL, megatron={"no_rope_freq": pattern}, sliding_window=own.get("sliding_window"))
    kind = "full_attention" if model.sliding_window is None else "sliding_attention"
    return model, transformers.SmolLM3Config(
        **common(model),
        **{"no_rope_layer_interval": 2, "layer_types": [kind] * model.num_layers} | own,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def smollm3_marked() -> tuple[ModelSection, Any]:
    return smollm3([1, 0, 1], no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=6)
