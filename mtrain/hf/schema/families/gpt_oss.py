"""GPT-OSS: biases everywhere, attention sinks, and experts that are fused, transposed and interleaved on disk."""

from __future__ import annotations

from mtrain.hf.schema.config import Constant, Field, Required, Rope, heads
from mtrain.hf.schema.families.common import (
    ATTENTION,
    KEY,
    NORMS,
    THEIRS,
    VOCABULARY,
    ListedWindows,
    common,
    has_experts,
    in_layer,
    router,
)
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.table import Rule, TensorPattern

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _fused(key: str, axes: str, name: str, on_disk: str) -> Rule:
    return Rule(
        f"{KEY}mlp.experts.experts.{key}", axes, (TensorPattern(f"{THEIRS}mlp.experts.{name}", on_disk),), has_experts
    )


_EXPERTS = (
    # on disk transposed, and gate and up interleaved (even columns gate): read as halves it would train, and be wrong
    _fused("linear_fc1.weight", "E (c e) h", "gate_up_proj", "E h (e c)"),
    _fused("linear_fc1.bias", "E (c e)", "gate_up_proj_bias", "E (e c)"),
    _fused("linear_fc2.weight", "E h e", "down_proj", "E e h"),
    _fused("linear_fc2.bias", "E h", "down_proj_bias", "E h"),
)

GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        *common(norm_epsilon=1e-5),
        *heads(groups=8, head_dim=64),
        Field("intermediate_size", "experts.ffn_hidden_size", 2880),
        Field("num_local_experts", "experts.num_experts", 128, alias="num_experts"),
        Field("num_experts_per_tok", "experts.top_k", 4, alias="experts_per_token"),
        Required("hidden_act", "silu", "silu", ("swish",)),
        # linear_bias below is one switch for all projections: model.* cannot express a file without those of attention
        Required("attention_bias", True, True),
        # our swiglu_clamped has both numbers fixed
        Required("swiglu_alpha", 1.702, 1.702),
        Required("swiglu_limit", 7.0, 7.0),
        Constant("activation", "swiglu_clamped"),
        Constant("linear_bias", True),
        Constant("attention_sinks", True),
        Constant("experts.router_bias", True),
        # the softmax is over the chosen experts alone, so their weights add up to 1
        Constant("experts.pre_softmax", False),
        ListedWindows(every=2, window=128),
        Rope(150000.0, _YARN),
    ),
    (
        *VOCABULARY,
        *NORMS,
        *ATTENTION,
        in_layer("self_attention.core_attention.softmax_offset", "self_attn.sinks", "H"),
        router("mlp.router.weight"),
        in_layer("mlp.router.bias", "mlp.router.bias", "E").only(has_experts),
        *_EXPERTS,
    ),
)
