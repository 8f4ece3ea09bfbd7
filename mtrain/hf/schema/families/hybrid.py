"""Qwen3-Next and Qwen3.5, with or without images: gated delta nets, with gated attention in every n-th layer."""

from dataclasses import replace
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.vision import TrainedTower
from mtrain.hf.schema.config import Constant, Entry, Field, Required, Rope, heads, lookup
from mtrain.hf.schema.families.common import (
    ACTIVATION,
    ATTENTION,
    FEED_FORWARD,
    KEY,
    MAX_LISTED_LAYERS,
    NORMS,
    THEIRS,
    VOCABULARY,
    ahead,
    by_group,
    common,
    experts,
    has_shared_gate,
    in_layer,
    listed_kinds,
    router,
    shared_experts,
)
from mtrain.hf.schema.families.experts import NO_DENSE_LAYERS, RENORMALISED, GatedShare
from mtrain.hf.schema.family import Family, in_tower
from mtrain.hf.schema.table import Rule, TensorPattern, stretch
from mtrain.hf.schema.tower import Tower, default_sizes
from mtrain.hf.schema.values import needed_value

_FULL, _LINEAR = "full_attention", "linear_attention"
_INTERVAL = "full_attention_interval"


@final
class _HybridLayers(Entry):
    """Layers with attention among delta nets, from a list with a word per layer or from their distance."""

    names = ("layer_types", _INTERVAL)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        kinds = _kinds(config)
        every = kinds.index(_FULL) + 1 if _FULL in kinds else 0
        if every < 2 or kinds != _pattern(every, len(kinds)):
            raise DataError(
                f"config.json: layer_types must have {_FULL} in every n-th layer, {_LINEAR} in all others and both; "
                f"layers {', '.join(str(layer) for layer, kind in enumerate(kinds, 1) if kind == _FULL) or 'none'} of "
                f"{len(kinds)} have {_FULL}"
            )
        return {"delta_net.full_attention_every": every}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        every = lookup(model, "delta_net.full_attention_every")
        distance = {_INTERVAL: every} if _INTERVAL in config else {}
        return {"layer_types": _pattern(every, model.num_layers), **distance} if every else {}


def _pattern(every: int, num_layers: int) -> list[str]:
    return [_LINEAR if layer % every else _FULL for layer in range(1, num_layers + 1)]


def _kinds(config: dict[str, Any]) -> list[str]:
    """Returns the kind of each layer."""
    num_layers = needed_value(config, "num_hidden_layers", int)
    kinds = config.get("layer_types")
    if kinds is None:
        every = needed_value(config, _INTERVAL, int, 4)
        if not 0 < num_layers <= MAX_LISTED_LAYERS or every < 1:
            raise DataError(
                f"config.json: num_hidden_layers={num_layers} and {_INTERVAL}={every} must be above 0, and at most "
                f"{MAX_LISTED_LAYERS} layers are supported; correct the file"
            )
        return _pattern(every, num_layers)
    return listed_kinds(kinds, num_layers, (_FULL, _LINEAR))


def _has_attention(model: ModelSection, layer: int) -> bool:
    return model.attention(layer) == "grouped"


def _has_delta_net(model: ModelSection, layer: int) -> bool:
    return model.attention(layer) == "delta_net"


_ROWS = {"queries": "x", "keys": "x", "values": "r y", "gates": "r y", "rates": "r", "decays": "r"}
"""Kind of a key head's rows, in order -> axes whose product is their number; the first three kinds are convolved."""


def _by_kind(axes: str) -> tuple[TensorPattern, ...]:
    """Returns the pieces of a tensor, queries, keys and values of all heads, which we order by key head instead."""
    return tuple(TensorPattern("", axes, stretch("w", _ROWS, kind)) for kind in ("queries", "keys", "values"))


_NET = f"{THEIRS}linear_attn."
_IN_PROJ = f"{KEY}self_attention.in_proj.weight"
_TWO_PROJECTIONS = Rule(
    _IN_PROJ,
    "(K p) h",
    (
        TensorPattern(f"{_NET}in_proj_qkvz.weight", "(K p) h", stretch("p", _ROWS, "queries", "gates")),
        TensorPattern(f"{_NET}in_proj_ba.weight", "(K p) h", stretch("p", _ROWS, "rates", "decays")),
    ),
    _has_delta_net,
)
_FOUR_PROJECTIONS = Rule(
    _IN_PROJ,
    "(K p) h",
    (
        TensorPattern(
            f"{_NET}in_proj_qkv.weight", "", stretch("p", _ROWS, "queries", "values"), "(K w) h", _by_kind("(K w) h")
        ),
        TensorPattern(f"{_NET}in_proj_z.weight", "(K p) h", stretch("p", _ROWS, "gates")),
        TensorPattern(f"{_NET}in_proj_b.weight", "(K p) h", stretch("p", _ROWS, "rates")),
        TensorPattern(f"{_NET}in_proj_a.weight", "(K p) h", stretch("p", _ROWS, "decays")),
    ),
    _has_delta_net,
)


def _of_net(key: str, name: str, axes: str) -> Rule:
    return in_layer(f"self_attention.{key}", f"linear_attn.{name}", axes).only(_has_delta_net)


_QUERIES_AND_GATES = TensorPattern(
    # on disk, a head's gate follows its query; we have all queries of a group before its gates
    f"{THEIRS}self_attn.q_proj.weight",
    "(G Q c d) h",
    {"s": slice(0, -2)},
    region="(G c Q d) h",
)
_ATTENTION = (
    Rule(
        f"{KEY}self_attention.linear_qkv.weight",
        "(G s d) h",
        (_QUERIES_AND_GATES, *by_group("weight", " h")[1:]),
        _has_attention,
    ),
    *(rule.only(_has_attention) for rule in ATTENTION[2:]),
)


def _layer(projections: Rule) -> tuple[Rule, ...]:
    return (
        NORMS[0].only(_has_attention),
        in_layer("input_layernorm.weight", "input_layernorm.weight", "h").only(_has_delta_net),
        *NORMS[1:],
        *_ATTENTION,
        projections,
        Rule(
            f"{KEY}self_attention.conv1d.weight",
            "(K w) o i",
            (TensorPattern(f"{_NET}conv1d.weight", "", pieces=_by_kind("(K w) o i")),),
            _has_delta_net,
        ),
        _of_net("A_log", "A_log", "(K r)"),
        _of_net("dt_bias", "dt_bias", "(K r)"),
        _of_net("out_norm.weight", "norm.weight", "y"),
        _of_net("out_proj.weight", "out_proj.weight", "h (K r y)"),
    )


_EXPERTS = (
    router("mlp.gate.weight"),
    *experts("mlp"),
    *shared_experts("mlp.shared_expert"),
    in_layer("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", "o h").only(has_shared_gate),
)


def _entries(groups: int) -> tuple[Entry, ...]:
    return (
        *common(),
        *ACTIVATION,
        *heads(groups, head_dim=256),
        Field("linear_num_key_heads", "delta_net.num_key_heads", 16),
        Field("linear_num_value_heads", "delta_net.num_value_heads", 32),
        Field("linear_key_head_dim", "delta_net.key_head_dim", 128),
        Field("linear_value_head_dim", "delta_net.value_head_dim", 128),
        Field("linear_conv_kernel_dim", "delta_net.conv_kernel", 4),
        _HybridLayers(),
        Required("attention_bias", False, False),
        Required("attn_output_gate", True, True),
        Constant("attention_gate", True),
        Constant("qk_norm", True),
        # files have weight - 1, except for the norm of a delta net's output
        Constant("zero_centered_norm", True),
        # positions on three axes for images, which coincide for text
        Rope(default_partial=0.25, unread=("mrope_section", "mrope_interleaved")),
    )


def _chosen(num_experts: int, top_k: int) -> tuple[Entry, ...]:
    return (
        Field("moe_intermediate_size", "experts.ffn_hidden_size", 512),
        GatedShare(512),
        Field("num_experts", "experts.num_experts", num_experts),
        Field("num_experts_per_tok", "experts.top_k", top_k),
    )


_AHEAD = "mtp."
# source: vLLM 0.11, models/qwen3_next_mtp.py; transformers does not read these tensors
_AHEAD_NAMES = tuple(f"{_AHEAD}{name}.weight" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))


def _all(*layer: Rule) -> tuple[Rule, ...]:
    enorm, hnorm, eh_proj, norm = _AHEAD_NAMES
    return (*VOCABULARY, *layer, *ahead(layer, enorm, hnorm, eh_proj, norm, f"{_AHEAD}layers.0."))


_INERT = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    (*_entries(2), *_chosen(512, 10), replace(RENORMALISED, default=True), *NO_DENSE_LAYERS),
    _all(*_layer(_TWO_PROJECTIONS), *FEED_FORWARD, *_EXPERTS),
    inert=_INERT,
    ahead=_AHEAD,
)
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _entries(4),
    _all(*_layer(_FOUR_PROJECTIONS), *FEED_FORWARD),
    inert=_INERT,
    ahead=_AHEAD,
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    (
        *(entry for entry in _entries(2) if entry.names != ("intermediate_size",)),
        *_chosen(256, 8),
        # the size of dense layers, which the model does not have
        Field("moe_intermediate_size", "ffn_hidden_size", 512),
        Constant("experts.pre_softmax", False),
    ),
    _all(*_layer(_FOUR_PROJECTIONS), *_EXPERTS),
    inert=(*_INERT, "intermediate_size"),
    ahead=_AHEAD,
)
_IMAGES: dict[str, Any] = {
    "is_tied": False,
    "is_tied_outside": False,
    "unread": "image_token_id video_token_id vision_start_token_id vision_end_token_id",
    "images": (r"model\.visual\..+",),
    "trained": TrainedTower(
        ("qwen3_5_vision", "qwen3_5", "qwen3_5_moe_vision", "qwen3_5_moe"),
        image_token=248056,
        rope_sections=(11, 11, 10),
    ),
}
QWEN3_5_IMAGES = in_tower(
    QWEN3_5,
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    Tower(
        "qwen3_5_text",
        defaults=default_sizes(layers=32, hidden=4096, feed_forward=12288, heads=16, vocabulary=248320),
        **_IMAGES,
    ),
)
QWEN3_5_MOE_IMAGES = in_tower(
    QWEN3_5_MOE,
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    Tower(
        "qwen3_5_moe_text",
        defaults={"num_hidden_layers": 40, "hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 248320},
        **_IMAGES,
    ),
)
FAMILIES = (QWEN3_NEXT, QWEN3_5, QWEN3_5_IMAGES, QWEN3_5_MOE, QWEN3_5_MOE_IMAGES)
