"""DeepSeek-V3, Kimi-K2 and GLM-4.7-Flash: latent attention, shared and routed experts, MTP.

GLM-4.5, 4.6 and 4.7 have the same experts and MTP, and partly rotated heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import DEPTHS, Computed, Constant, Entry, Field, Required, Rope, heads, lookup
from mtrain.hf.schema.families.common import (
    ACTIVATION,
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    THEIRS,
    VOCABULARY,
    ahead,
    common,
    experts,
    has_experts,
    in_layer,
    router,
    shared_experts,
)
from mtrain.hf.schema.family import Family, in_tower
from mtrain.hf.schema.tower import Tower, default_sizes
from mtrain.hf.schema.values import needed_value, shown, value_of

_SCORED = 2
"""Number of best experts whose scores rank a group."""
_LATENT_EPSILON = 1e-6
_TOP_K = "num_experts_per_tok"
_ROTATED = ("mla.qk_rope_head_dim", 64)
_DEFAULTS: dict[str, tuple[Any, Any, Any]] = {
    "num_attention_heads": (128, 20, None),
    "rms_norm_eps": (1e-6, 1e-5, 1e-5),
    "q_lora_rank": (1536, 768, None),
    "qk_nope_head_dim": (128, 192, None),
    "v_head_dim": (128, 256, None),
    "n_routed_experts": (256, 64, 128),
    _TOP_K: (8, 4, 8),
    "moe_intermediate_size": (2048, 1536, 1408),
    "n_group": (8, 1, 1),
    "topk_group": (4, 1, 1),
    "routed_scaling_factor": (2.5, 1.8, 1.0),
}
"""Field -> its different defaults in DeepSeek-V3, GLM-4.7-Flash and GLM-4.5."""
_DEEPSEEK, _GLM_LITE, _GLM = ({name: values[column] for name, values in _DEFAULTS.items()} for column in range(3))


def _has_low_rank_queries(model: ModelSection, layer: int) -> bool:
    return model.mla is not None and model.mla.q_lora_rank is not None


@final
@dataclass(frozen=True)
class _SharedExperts(Entry):
    """Number of shared experts, each as large as a routed one; our field is their total size."""

    size: int
    """Size of an expert if the file has none."""

    names = ("n_shared_experts", "moe_intermediate_size")
    part = "experts"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        number = value_of(config, "n_shared_experts", int, 1) or 0  # null means none
        return {
            "experts.shared_ffn_hidden_size": number * needed_value(config, "moe_intermediate_size", int, self.size)
        }

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        total, expert_size = lookup(model, "experts.shared_ffn_hidden_size"), lookup(model, "experts.ffn_hidden_size")
        # `config_of` notices a remainder when it reads the file back
        return {"n_shared_experts": None if total is None else total // expert_size}


@final
@dataclass(frozen=True)
class _DenseLayers(Entry):
    """Number of dense layers before those with experts."""

    default: int

    names = ("first_k_dense_replace", "num_hidden_layers")
    part = "experts"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        number = needed_value(config, "first_k_dense_replace", int, self.default)
        layers = value_of(config, "num_hidden_layers", int, None)
        if layers is not None and number >= layers:
            raise DataError(
                f"config.json: first_k_dense_replace={number} leaves no layer with experts among "
                f"num_hidden_layers={layers}, but dense models of this family are not supported; lower it"
            )
        return {"experts.first_dense_layers": number}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {"first_k_dense_replace": lookup(model, "experts.first_dense_layers")}


_DENSE, _SPARSE = "dense", "sparse"


@final
class _ListedExperts(Entry):
    """Layers with experts, listed by a word per layer; other programs read the number of dense layers before them."""

    names = ("mlp_layer_types", "first_k_dense_replace", "num_hidden_layers")
    part = "experts"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        number = _num_dense(config.get("mlp_layer_types"), needed_value(config, "num_hidden_layers", int))
        if needed_value(config, "first_k_dense_replace", int, number) != number:
            raise DataError(
                f"config.json: first_k_dense_replace={config['first_k_dense_replace']} contradicts mlp_layer_types "
                f"with {counted(number, 'dense layer')}, which transformers reads; correct the file"
            )
        return {"experts.first_dense_layers": number}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        number = lookup(model, "experts.first_dense_layers") or 0
        older = {name: number for name in ("first_k_dense_replace",) if name in config}
        return {"mlp_layer_types": _mlp_kinds(number, model.num_layers), **older}


def _mlp_kinds(num_dense: int, num_layers: int) -> list[str]:
    return [_DENSE] * num_dense + [_SPARSE] * (num_layers - num_dense)


def _num_dense(kinds: object, num_layers: int) -> int:
    """Counts the dense layers, which come first; one if the file lists no layers."""
    number = kinds.count(_DENSE) if isinstance(kinds, list) else 1
    # compares with a list of the same length, because a mistyped num_layers would fill the memory
    is_listed = isinstance(kinds, list) and len(kinds) == num_layers and kinds == _mlp_kinds(number, len(kinds))
    if number >= num_layers or not (kinds is None or is_listed):
        raise DataError(
            f"config.json: mlp_layer_types={shown(kinds)} must list {_DENSE} for any first layers, and {_SPARSE} for "
            f"the others, at least one of num_hidden_layers={num_layers}; correct the file"
        )
    return number


@final
@dataclass(frozen=True)
class DividedScores(Entry):
    """Switch that divides the scores of chosen experts by their sum.

    We divide if several are chosen. transformers reads only norm_topk_prob, and then gives a single expert weight 1.
    """

    top_k: int
    """Number of chosen experts if the file has none."""

    names = ("norm_topk_prob", _TOP_K)
    part = "experts"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        is_divided, top_k = (
            needed_value(config, "norm_topk_prob", bool, True),
            needed_value(config, _TOP_K, int, self.top_k),
        )
        if is_divided != (top_k > 1):
            raise DataError(
                f"config.json: norm_topk_prob={is_divided} with {_TOP_K}={top_k} is not supported, but {top_k > 1} "
                "is needed: mtrain divides scores by their sum exactly if several experts are chosen"
            )
        return {}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        top_k = lookup(model, "experts.top_k")
        return {"norm_topk_prob": top_k is None or top_k > 1}


@final
class _Depths(Entry):
    """MTP depths, for which a folder may lack the weights; transformers neither computes nor writes them."""

    names = (DEPTHS,)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"mtp_depths": value_of(config, DEPTHS, int, 0)}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {DEPTHS: model.mtp_depths}

    def agrees(self, config: dict[str, Any], model: ModelSection) -> bool:
        # a model without MTP keeps the field
        return model.mtp_depths in (0, config.get(DEPTHS, 0))


@final
@dataclass(frozen=True)
class Groups(Entry):
    """Groups of experts, which the family ranks by their 2 best experts; our default number is top_k / group_top_k.

    Omits `group_score_top_k` if it has no effect: if our default is 2, as in DeepSeek-V3 with 8 experts from 4 groups,
    or if all groups are chosen. So an import of version 0.1.0 agrees with its folder exactly if it computed the
    family's function.
    """

    defaults: Mapping[str, Any]

    names = ("n_group", "topk_group", _TOP_K)
    part = "experts"

    @property
    def off(self) -> Mapping[str, Any]:
        return {"n_group": 1, "topk_group": 1}

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        num_groups, group_top_k, top_k = (needed_value(config, name, int, self.defaults[name]) for name in self.names)
        is_free = top_k == _SCORED * group_top_k or (num_groups == group_top_k > 0 == top_k % group_top_k)
        return {
            "experts.num_groups": num_groups,
            "experts.group_top_k": group_top_k,
            "experts.group_score_top_k": None if is_free else _SCORED,
        }

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        groups, group_top_k = lookup(model, "experts.num_groups"), lookup(model, "experts.group_top_k")
        return {"n_group": 1 if groups is None else groups, "topk_group": 1 if group_top_k is None else group_top_k}


@final
@dataclass(frozen=True)
class _LatentNorms(Entry):
    """The epsilon of latent norms, which is always 1e-6.

    Omits our field if rms_norm_eps, its default, has the same value.
    """

    outer: float
    """The other norms' epsilon if the file has none."""

    names = ("rms_norm_eps",)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        epsilon = needed_value(config, "rms_norm_eps", float, self.outer)
        return {"mla.norm_epsilon": None if epsilon == _LATENT_EPSILON else _LATENT_EPSILON}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {}  # the file has no such field; `config_of` refuses another value


_LATENT_ATTENTION = (
    in_layer("input_layernorm.weight", "input_layernorm.weight", "h"),
    # queries come from one projection, or from a projection to a latent, its norm, and a projection up
    in_layer("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", "(H x) h").only(
        lambda model, layer: model.mla is None or model.mla.q_lora_rank is None
    ),
    in_layer("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", "q h").only(
        _has_low_rank_queries
    ),
    in_layer("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight", "q").only(
        _has_low_rank_queries
    ),
    in_layer("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", "(H x) q").only(
        _has_low_rank_queries
    ),
    # m: latent of keys and values, followed by the rotated part of the key, which all heads share
    in_layer("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "m h"),
    in_layer("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight", "k"),
    in_layer("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", "(H y) k"),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "h (H v)"),
)
_EXPERTS = (
    router("mlp.gate.weight"),
    # float32 even with bf16 weights, which would round its small steps away
    replace(
        in_layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "E").only(has_experts), keeps_dtype=True
    ),
    *experts("mlp"),
    *shared_experts(),
)
_LAYER = (*NORMS[1:], *_LATENT_ATTENTION, *FEED_FORWARD, *_EXPERTS)
# transformers omits these tensors, so the names are those of DeepSeek's own files
_AHEAD = tuple(f"{THEIRS}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))


def _of(defaults: Mapping[str, Any], theirs: str, ours: str, alias: str = "", without: Any = None) -> Field:
    return Field(theirs, ours, defaults[theirs], alias=alias, without=without)


def _experts(defaults: Mapping[str, Any], dense_layers: Entry) -> tuple[Entry, ...]:
    return (
        # transformers knows the alias from attribute_map, and some programs write it
        _of(defaults, "n_routed_experts", "experts.num_experts", alias="num_local_experts"),
        _of(defaults, _TOP_K, "experts.top_k"),
        _of(defaults, "moe_intermediate_size", "experts.ffn_hidden_size"),
        _SharedExperts(defaults["moe_intermediate_size"]),
        dense_layers,
        Groups(defaults),
        _of(defaults, "routed_scaling_factor", "experts.scaling_factor", without=1.0),
        Constant("experts.score", "sigmoid"),
        Constant("experts.expert_bias", True),
        _Depths(),
    )


def _scores(top_k: int) -> tuple[Entry, ...]:
    return (
        DividedScores(top_k),
        Required("scoring_func", "sigmoid", "sigmoid", part="experts"),
        Required("topk_method", "noaux_tc", "noaux_tc", part="experts"),
    )


def _entries(defaults: Mapping[str, Any], dense_layers: Entry) -> tuple[Entry, ...]:
    return (
        *common(norm_epsilon=defaults["rms_norm_eps"]),
        *ACTIVATION,
        # latent attention has no query groups, but transformers repeats keys by the ratio of these numbers
        Computed(
            "num_key_value_heads",
            {"num_attention_heads": ("num_attention_heads", defaults["num_attention_heads"])},
            is_written=True,
        ),
        # files name the rotated part head_dim, because rotary embeddings read their size there
        Computed("head_dim", {"qk_rope_head_dim": _ROTATED}),
        Computed(
            "qk_head_dim",
            {
                "qk_nope_head_dim": ("mla.qk_nope_head_dim", defaults["qk_nope_head_dim"]),
                "qk_rope_head_dim": _ROTATED,
            },
        ),
        _LatentNorms(defaults["rms_norm_eps"]),
        _of(defaults, "q_lora_rank", "mla.q_lora_rank"),
        Field("kv_lora_rank", "mla.kv_lora_rank", 512),
        _of(defaults, "qk_nope_head_dim", "mla.qk_nope_head_dim"),
        Field("qk_rope_head_dim", "mla.qk_rope_head_dim", 64),
        _of(defaults, "v_head_dim", "mla.v_head_dim"),
        *_experts(defaults, dense_layers),
        Field("rope_interleave", "rope.interleaved", True),
        *_scores(defaults[_TOP_K]),
        Required("moe_layer_freq", 1, 1, part="experts", is_off=True),
        Required("attention_bias", False, False),
        Rope(),
    )


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _entries(_DEEPSEEK, _DenseLayers(3)),
    (*VOCABULARY, *_LAYER, *ahead(_LAYER, *_AHEAD)),
)
# the same function with another name and other sizes
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")
KIMI_K25 = in_tower(
    DEEPSEEK_V3,
    "kimi_k25",
    "Kimi_K25ForConditionalGeneration",
    Tower(
        "deepseek_v3",
        is_tied=False,
        # defaults of DeepseekV3Config
        defaults=default_sizes(layers=61, hidden=7168, feed_forward=18432, heads=128, vocabulary=129280),
        unread="""ignore_index image_token_id media_placeholder_token_id projection_hidden_size
            projection_layer_norm_eps use_unified_vision_chunk video_placeholder video_token_id vision_end_token_id
            vision_start_token_id""",
        images=(r"(model\.)?(vision_tower|mm_projector)\..+",),
        aliases=("kimi_k2",),
    ),
)
# GLM-4.7-Flash, the same function with other defaults
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    entries=_entries(_GLM_LITE, _ListedExperts()),
)
_GLM_LAYER = (*NORMS, *ATTENTION, *FEED_FORWARD, *_EXPERTS)
GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (
        *common(norm_epsilon=1e-5),
        *ACTIVATION,
        *heads(groups=8),
        # the output projection has no bias in this family
        Field("attention_bias", "qkv_bias", False),
        Field("use_qk_norm", "qk_norm", False),
        *_experts(_GLM, _DenseLayers(1)),
        *_scores(_GLM[_TOP_K]),
        Rope(default_partial=0.5),
    ),
    (*VOCABULARY, *_GLM_LAYER, *ahead(_GLM_LAYER, *_AHEAD)),
)
FAMILIES = (DEEPSEEK_V3, KIMI_K2, KIMI_K25, GLM4_MOE_LITE)
