"""DeepSeek-V3 and Kimi-K2: latent attention, shared and routed experts after dense layers, predictions ahead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import DEPTHS, Computed, Constant, Entry, Field, Required, Rope, lookup
from mtrain.hf.schema.families.common import (
    ACTIVATION,
    FEED_FORWARD,
    KEY,
    NORMS,
    THEIRS,
    VOCABULARY,
    common,
    experts,
    halves,
    has_experts,
    in_layer,
    router,
    same,
)
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.table import Rule
from mtrain.hf.schema.values import needed_value, value_of

_SCORED = 2
"""Number of best experts whose sum ranks a group."""
_LATENT_EPSILON = 1e-6
_TOP_K = "num_experts_per_tok"
_ROTATED = ("mla.qk_rope_head_dim", 64)


def _has_low_rank_queries(model: ModelSection, layer: int) -> bool:
    return model.mla is not None and model.mla.q_lora_rank is not None


def _has_direct_queries(model: ModelSection, layer: int) -> bool:
    return not _has_low_rank_queries(model, layer)


def _has_shared_experts(model: ModelSection, layer: int) -> bool:
    return model.has_experts(layer) and model.experts is not None and model.experts.shared_ffn_hidden_size > 0


@final
@dataclass(frozen=True)
class _SharedExperts(Entry):
    """Number of shared experts, each as large as a routed one; ours is their total size."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("n_shared_experts", "moe_intermediate_size")

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        number = value_of(config, "n_shared_experts", int, 1) or 0  # null: there are none
        return {"experts.shared_ffn_hidden_size": number * needed_value(config, "moe_intermediate_size", int, 2048)}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        together, one = lookup(model, "experts.shared_ffn_hidden_size"), lookup(model, "experts.ffn_hidden_size")
        # a remainder is noticed when the file is read back (`config_of`)
        return {"n_shared_experts": None if together is None else together // one}


@final
@dataclass(frozen=True)
class _DenseLayers(Entry):
    """Number of dense layers before those with experts; transformers also accepts one that leaves no layer with
    experts."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("first_k_dense_replace", "num_hidden_layers")

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        number = needed_value(config, "first_k_dense_replace", int, 3)
        layers = value_of(config, "num_hidden_layers", int, None)
        if layers is not None and number >= layers:
            raise DataError(
                f"config.json: first_k_dense_replace={number} leaves none of num_hidden_layers={layers} layers with "
                "experts, and a dense model of this family is not supported; at least one layer with experts is needed"
            )
        return {"experts.first_dense_layers": number}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {"first_k_dense_replace": lookup(model, "experts.first_dense_layers")}


@final
@dataclass(frozen=True)
class _DividedScores(Entry):
    """Switch that says whether the scores of the chosen experts are divided by their sum.

    Ours are divided where several are chosen. transformers uses only norm_topk_prob, so that the weight of a single one
    is 1.
    """

    @property
    def names(self) -> tuple[str, ...]:
        return ("norm_topk_prob", _TOP_K)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        said, top_k = needed_value(config, "norm_topk_prob", bool, True), needed_value(config, _TOP_K, int, 8)
        if said != (top_k > 1):
            raise DataError(
                f"config.json: norm_topk_prob={said} with {_TOP_K}={top_k} is not supported, but {top_k > 1} "
                "is needed: scores are divided by their sum where there are several"
            )
        return {}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        top_k = lookup(model, "experts.top_k")
        return {"norm_topk_prob": top_k is None or top_k > 1}


@final
@dataclass(frozen=True)
class _Depths(Entry):
    """Predictions further ahead. A file may configure them without weights: transformers neither computes nor writes
    them."""

    @property
    def names(self) -> tuple[str, ...]:
        return (DEPTHS,)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"mtp_depths": value_of(config, DEPTHS, int, 0)}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {DEPTHS: model.mtp_depths}

    def agrees(self, config: dict[str, Any], model: ModelSection) -> bool:
        # a model without the depths leaves the field as it was
        return model.mtp_depths in (0, config.get(DEPTHS, 0))


@final
@dataclass(frozen=True)
class _Groups(Entry):
    """Groups of experts. The family ranks a group by its 2 best experts; our default is top_k / group_top_k.

    `group_score_top_k` is left out where it changes nothing: where the default is 2, as in DeepSeek-V3 with 8 experts
    of 4 groups, and where all groups are kept. So an import of version 0.1.0 agrees with its folder if and only if it
    computed the family's function.
    """

    @property
    def names(self) -> tuple[str, ...]:
        return ("n_group", "topk_group", "num_experts_per_tok")

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        num_groups, kept = needed_value(config, "n_group", int, 8), needed_value(config, "topk_group", int, 4)
        top_k = needed_value(config, "num_experts_per_tok", int, 8)
        is_free = top_k == _SCORED * kept or (num_groups == kept > 0 == top_k % kept)
        return {
            "experts.num_groups": num_groups,
            "experts.group_top_k": kept,
            "experts.group_score_top_k": None if is_free else _SCORED,
        }

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        groups, kept = lookup(model, "experts.num_groups"), lookup(model, "experts.group_top_k")
        return {"n_group": 1 if groups is None else groups, "topk_group": 1 if kept is None else kept}


@final
@dataclass(frozen=True)
class _LatentNorms(Entry):
    """The epsilon of the norms of latents, which is 1e-6 whatever rms_norm_eps says.

    Our field is left out where rms_norm_eps has the same value, as it is our default.
    """

    @property
    def names(self) -> tuple[str, ...]:
        return ("rms_norm_eps",)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        epsilon = needed_value(config, "rms_norm_eps", float, _LATENT_EPSILON)
        return {"mla.norm_epsilon": None if epsilon == _LATENT_EPSILON else _LATENT_EPSILON}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {}  # cannot be written; `config_of` refuses another value


_LATENT_ATTENTION = (
    in_layer("input_layernorm.weight", "input_layernorm.weight", "h"),
    # one of two ways to the queries: direct, or down to a latent, its norm, and up
    in_layer("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", "(H x) h").only(_has_direct_queries),
    in_layer("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", "q h").only(
        _has_low_rank_queries
    ),
    in_layer("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight", "q").only(
        _has_low_rank_queries
    ),
    in_layer("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", "(H x) q").only(
        _has_low_rank_queries
    ),
    # m: the latent of keys and values, followed by the rotated part of the key, which all heads share
    in_layer("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "m h"),
    in_layer("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight", "k"),
    in_layer("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", "(H y) k"),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "h (H v)"),
)
_SHARED = f"{THEIRS}mlp.shared_experts."
_EXPERTS = (
    router("mlp.gate.weight"),
    # float32 even in files of bf16 weights: it moves by small steps, which bf16 would round away
    replace(
        in_layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "E").only(has_experts), keeps_dtype=True
    ),
    *experts("mlp"),
    Rule(
        f"{KEY}mlp.shared_experts.linear_fc1.weight",
        "(c t) h",
        halves(f"{_SHARED}gate_proj.weight", f"{_SHARED}up_proj.weight", "t h"),
        _has_shared_experts,
    ),
    in_layer("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight", "h t").only(
        _has_shared_experts
    ),
)
_LAYER = (*NORMS[1:], *_LATENT_ATTENTION, *FEED_FORWARD, *_EXPERTS)
_DEPTH = "mtp.layers.*."
_AHEAD = (  # transformers omits these tensors, so the names are those of DeepSeek's own files
    same(f"{_DEPTH}enorm.weight", f"{THEIRS}enorm.weight", "h"),
    same(f"{_DEPTH}hnorm.weight", f"{THEIRS}hnorm.weight", "h"),
    same(f"{_DEPTH}eh_proj.weight", f"{THEIRS}eh_proj.weight", "h j"),
    # a depth has a whole layer, so the rules of layers serve it under another prefix
    *(replace(rule, key=rule.key.replace(KEY, f"{_DEPTH}transformer_layer.")) for rule in _LAYER),
    same(f"{_DEPTH}final_layernorm.weight", f"{THEIRS}shared_head.norm.weight", "h"),
)

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (
        *common(),
        *ACTIVATION,
        # latent attention has no groups, but transformers repeats keys by the ratio of both numbers
        Computed("num_key_value_heads", {"num_attention_heads": ("num_attention_heads", 128)}, is_written=True),
        # DeepseekV3Config calls the rotated part head_dim, as rotary embeddings read their size there
        Computed("head_dim", {"qk_rope_head_dim": _ROTATED}),
        Computed("qk_head_dim", {"qk_nope_head_dim": ("mla.qk_nope_head_dim", 128), "qk_rope_head_dim": _ROTATED}),
        _LatentNorms(),
        Field("q_lora_rank", "mla.q_lora_rank", 1536),
        Field("kv_lora_rank", "mla.kv_lora_rank", 512),
        Field("qk_nope_head_dim", "mla.qk_nope_head_dim", 128),
        Field("qk_rope_head_dim", "mla.qk_rope_head_dim", 64),
        Field("v_head_dim", "mla.v_head_dim", 128),
        # the alias is in its attribute_map, and some programs write it
        Field("n_routed_experts", "experts.num_experts", 256, alias="num_local_experts"),
        Field("num_experts_per_tok", "experts.top_k", 8),
        Field("moe_intermediate_size", "experts.ffn_hidden_size", 2048),
        _SharedExperts(),
        _DenseLayers(),
        _Groups(),
        Field("routed_scaling_factor", "experts.scaling_factor", 2.5),
        Constant("experts.score", "sigmoid"),
        Constant("experts.expert_bias", True),
        _Depths(),
        Field("rope_interleave", "rope.interleaved", True),
        _DividedScores(),
        Required("scoring_func", "sigmoid", "sigmoid"),
        Required("topk_method", "noaux_tc", "noaux_tc"),
        Required("moe_layer_freq", 1, 1),
        Required("attention_bias", False, False),
        Rope(),
    ),
    (*VOCABULARY, *_LAYER, *_AHEAD),
)
# the same function under another name, and with other sizes
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")
