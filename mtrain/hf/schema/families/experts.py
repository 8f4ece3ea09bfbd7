"""Mixtral, Qwen2-MoE, Qwen3-MoE, Qwen3-VL-MoE, MiniMax-M2, GPT-OSS: the usual transformer with experts in each layer.

MiniMax-M2 scores experts with a sigmoid, normalises whole queries and keys, and rotates heads partly. GPT-OSS has
biases everywhere, attention sinks, and experts that are fused, transposed and interleaved on disk.
"""

from dataclasses import dataclass, replace
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import Constant, Entry, Field, Required, Rope, heads, lookup
from mtrain.hf.schema.families.common import (
    ACTIVATION,
    ATTENTION,
    FIRST,
    KEY,
    NORMS,
    THEIRS,
    VOCABULARY,
    Windows,
    alternating_first,
    common,
    every_nth,
    experts,
    has_experts,
    has_shared_gate,
    in_layer,
    router,
    shared_experts,
)
from mtrain.hf.schema.families.dense import QWEN3_VL
from mtrain.hf.schema.family import Family, in_tower
from mtrain.hf.schema.table import Rule, TensorPattern
from mtrain.hf.schema.tower import default_sizes
from mtrain.hf.schema.values import needed_value

# a softmax over the chosen experts equals a softmax over all experts, divided by the sum of the chosen ones
RENORMALISED = Field("norm_topk_prob", "experts.pre_softmax", False, is_negated=True)


@final
@dataclass(frozen=True)
class GatedShare(Entry):
    """Size of the gated shared experts; 0 for none."""

    default: int
    """Size if the file has none."""

    names = ("shared_expert_intermediate_size",)
    part = "experts"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        size = needed_value(config, "shared_expert_intermediate_size", int, self.default)
        return {"experts.shared_ffn_hidden_size": size, "experts.shared_gate": size > 0}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {"shared_expert_intermediate_size": lookup(model, "experts.shared_ffn_hidden_size")}


_TOP_K = "num_experts_per_tok"


@final
@dataclass(frozen=True)
class _SeveralExperts(Entry):
    """Number of chosen experts, at least 2; the family always divides their scores by their sum, and we do so if
    several are chosen."""

    default: int
    """Number if the file has none."""

    names = (_TOP_K,)
    part = "experts"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        top_k = needed_value(config, _TOP_K, int, self.default)
        if top_k == 1:
            raise DataError(
                f"config.json: {_TOP_K}=1 is not supported, but 2 or more are needed: this family gives a single "
                "expert weight 1"
            )
        return {"experts.top_k": top_k}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {_TOP_K: lookup(model, "experts.top_k")}


def _fused(key: str, axes: str, name: str, on_disk: str, transposed: str = "") -> Rule:
    part = TensorPattern(f"{THEIRS}mlp.experts.{name}", on_disk, transposed=transposed)
    return Rule(f"{KEY}mlp.experts.experts.{key}", axes, (part,), has_experts)


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (
        *common(norm_epsilon=1e-5),
        *ACTIVATION,
        *heads(groups=8),
        Field("sliding_window", "sliding_window"),
        Field("intermediate_size", "experts.ffn_hidden_size"),
        Field("num_local_experts", "experts.num_experts", 8, alias="num_experts"),
        Field("num_experts_per_tok", "experts.top_k", 2),
        Constant("experts.pre_softmax", False),
        # noise on the input of router and experts in training, which we do not have
        Required("router_jitter_noise", 0.0, 0.0, (None,)),
        Rope(1e6),
    ),
    (
        *VOCABULARY,
        *NORMS,
        *ATTENTION,
        router("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        *experts("block_sparse_moe", "mlp", gate="w1", up="w3", down="w2"),
    ),
)
# these fields could make some layers dense, for which these families have no rules
NO_DENSE_LAYERS = (
    Required("decoder_sparse_step", 1, 1, part="experts", is_off=True),
    Required("mlp_only_layers", [], [], (None,), part="experts"),
)
_SHARED = "mlp.shared_expert"
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        *common(),
        *ACTIVATION,
        *heads(groups=16),
        Field("moe_intermediate_size", "experts.ffn_hidden_size", 1408),
        GatedShare(5632),
        Field("num_experts", "experts.num_experts", 60),
        Field("num_experts_per_tok", "experts.top_k", 4),
        RENORMALISED,
        Field("qkv_bias", "qkv_bias", True),
        *NO_DENSE_LAYERS,
        Windows(4096, alternating_first, (FIRST,)),
        Rope(),
    ),
    (
        *VOCABULARY,
        *NORMS,
        *ATTENTION,
        router("mlp.gate.weight"),
        *experts("mlp"),
        *shared_experts(_SHARED),
        in_layer("mlp.shared_experts.gate_weight", f"{_SHARED}_gate.weight", "o h").only(has_shared_gate),
    ),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        *common(),
        *ACTIVATION,
        *heads(groups=4),
        Field("moe_intermediate_size", "experts.ffn_hidden_size", 768),
        Field("num_experts", "experts.num_experts", 128, alias="num_local_experts"),
        Field("num_experts_per_tok", "experts.top_k", 8),
        RENORMALISED,
        Required("attention_bias", False, False),
        *NO_DENSE_LAYERS,
        Constant("qk_norm", True),
        Windows(4096, None),  # in all layers or in none
        Rope(),
    ),
    (*VOCABULARY, *NORMS, *ATTENTION, router("mlp.gate.weight"), *experts("mlp")),
    # Qwen3MoeConfig has no such fields, so they have no effect
    inert=("max_window_layers", "use_qk_norm"),
)
assert QWEN3_VL.tower is not None
assert QWEN3_VL.tower.trained is not None
QWEN3_VL_MOE = in_tower(
    Family(
        "qwen3_vl_moe_text",
        "Qwen3VLMoeForCausalLM",
        (
            *common(),
            *ACTIVATION,
            *heads(groups=16),
            Field("moe_intermediate_size", "experts.ffn_hidden_size", 1408),
            Field("num_experts", "experts.num_experts", 60, alias="num_local_experts"),
            _SeveralExperts(4),
            Constant("experts.pre_softmax", False),
            # a field of published files, which transformers does not read
            Required("norm_topk_prob", True, True, part="experts"),
            Required("attention_bias", False, False),
            *NO_DENSE_LAYERS,
            Constant("qk_norm", True),
            # positions on three axes for images, which coincide for text
            Rope(default_base=500000.0, unread=("mrope_section", "mrope_interleaved"), needs_scaling=True),
        ),
        (
            *VOCABULARY,
            *NORMS,
            *ATTENTION,
            router("mlp.gate.weight"),
            # published as here; transformers 5 reads both forms, and saves the other one
            _fused("linear_fc1.weight", "E (c e) h", "gate_up_proj", "E h (c e)", transposed="E (c e) h"),
            _fused("linear_fc2.weight", "E h e", "down_proj", "E e h", transposed="E h e"),
        ),
        # Qwen3VLMoeTextConfig sets it to None, whatever the file says
        inert=("sliding_window",),
    ),
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    replace(
        QWEN3_VL.tower,
        text_type="qwen3_vl_moe_text",
        defaults=default_sizes(layers=24, hidden=2048, feed_forward=5632, heads=16, vocabulary=151936),
        trained=replace(QWEN3_VL.tower.trained, types=("qwen3_vl_moe_vision", "qwen3_vl_moe")),
    ),
)
MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    (
        *common(),
        *ACTIVATION,
        *heads(groups=8, head_dim=128),
        Field("intermediate_size", "experts.ffn_hidden_size", 1536),
        Field("num_local_experts", "experts.num_experts", 256, alias="num_experts"),
        _SeveralExperts(8),
        Constant("experts.score", "sigmoid"),
        Constant("experts.expert_bias", True),
        Constant("qk_norm", True),
        Constant("qk_norm_width", "full"),
        # fields of published files that describe the function, but that transformers does not read
        Required("scoring_func", "sigmoid", "sigmoid", part="experts"),
        Required("use_routing_bias", True, True, part="experts"),
        Required("use_qk_norm", True, True),
        Required("qk_norm_type", "per_layer", "per_layer"),
        Required("shared_intermediate_size", 0, 0, (None,)),
        # noise on the input of router and experts in training, which we do not have
        Required("router_jitter_noise", 0.0, 0.0, (None,)),
        Rope(5e6, default_partial=1.0, rotary_size="rotary_dim"),
    ),
    (
        *VOCABULARY,
        *NORMS,
        *ATTENTION,
        router("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        # float32 even with bf16 weights, which would round its small steps away
        replace(
            in_layer("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias", "E").only(has_experts),
            keeps_dtype=True,
        ),
        *experts("block_sparse_moe", "mlp", gate="w1", up="w3", down="w2"),
    ),
)
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


_EXPERTS = (
    # transposed on disk, with gate (even columns) and up interleaved; read as halves, it would train, but wrongly
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
        # linear_bias below is one switch for all projections, so model.* cannot express a file without attention biases
        Required("attention_bias", True, True),
        # our swiglu_clamped has these constants
        Required("swiglu_alpha", 1.702, 1.702),
        Required("swiglu_limit", 7.0, 7.0),
        Constant("activation", "swiglu_clamped"),
        Constant("linear_bias", True),
        Constant("attention_sinks", True),
        Constant("experts.router_bias", True),
        # the softmax is over the chosen experts only, so their weights add up to 1
        Constant("experts.pre_softmax", False),
        Windows(128, every_nth(2), has_switch=False),
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
FAMILIES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, QWEN3_VL_MOE)
