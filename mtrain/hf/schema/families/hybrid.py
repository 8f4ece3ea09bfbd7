"""Qwen3-Next and Qwen3.5, with or without images: gated delta nets, and gated attention every few layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
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
    by_group,
    common,
    experts,
    has_shared_gate,
    in_layer,
    router,
    same,
    shared_experts,
)
from mtrain.hf.schema.families.experts import NO_DENSE_LAYERS, GatedShare, Renormalised
from mtrain.hf.schema.family import Family, in_tower
from mtrain.hf.schema.table import Fixed, Rule, TensorPattern
from mtrain.hf.schema.tower import Tower
from mtrain.hf.schema.values import needed_value

_FULL, _LINEAR = "full_attention", "linear_attention"
_INTERVAL = "full_attention_interval"
_MROPE = ("mrope_section", "mrope_interleaved")


@final
@dataclass(frozen=True)
class _HybridLayers(Entry):
    """Layers with attention among delta nets: one word per layer, or their distance."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("layer_types", _INTERVAL)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        kinds = _kinds(config)
        every = kinds.index(_FULL) + 1 if _FULL in kinds else 0
        if every < 2 or kinds != _pattern(every, len(kinds)):
            raise DataError(
                f"config.json: layer_types must have {_FULL} in every n-th layer, {_LINEAR} in all others and both; "
                f"layers {', '.join(str(place) for place, kind in enumerate(kinds, 1) if kind == _FULL) or 'none'} of "
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
                f"config.json: num_hidden_layers={num_layers} and {_INTERVAL}={every} must be above 0, and no more "
                "than a model has; correct the file"
            )
        return _pattern(every, num_layers)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in (_FULL, _LINEAR) for kind in kinds):
        raise DataError(
            f"config.json: layer_types must list {_FULL} or {_LINEAR} for each of num_hidden_layers={num_layers} "
            "layers; correct the file"
        )
    return kinds


@final
@dataclass(frozen=True)
class _TextRope(Entry):
    """The rotary embedding: three axes for images, which coincide for text."""

    @property
    def names(self) -> tuple[str, ...]:
        return _ROPE.names

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        return _ROPE.read(_without_axes(config))

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        changes = _ROPE.write(config, model)
        # kept for images, where the file has them
        for kind in ("rope_parameters", "rope_scaling"):
            if changes.get(kind) and isinstance(config.get(kind), dict):
                changes[kind] |= {name: config[kind][name] for name in _MROPE if name in config[kind]}
        return changes

    def older(self, config: dict[str, Any]) -> dict[str, Any]:
        return _ROPE.older(config)


_ROPE = Rope(default_partial=0.25)


def _without_axes(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {kind: config[kind] for kind in ("rope_parameters", "rope_scaling") if isinstance(config.get(kind), dict)}
    return {**config} | {
        kind: {name: value for name, value in given.items() if name not in _MROPE} for kind, given in kinds.items()
    }


def _has_attention(model: ModelSection, layer: int) -> bool:
    return model.attention(layer) == "grouped"


def _has_delta_net(model: ModelSection, layer: int) -> bool:
    return model.attention(layer) == "delta_net"


def _widths(sizes: Mapping[str, int]) -> tuple[int, int]:
    return sizes["x"], sizes["r"] * sizes["y"]


def _mixed(sizes: Mapping[str, int]) -> Fixed:
    query, value = _widths(sizes)
    return {"p": slice(0, 2 * query + value)}


def _mixed_and_gates(sizes: Mapping[str, int]) -> Fixed:
    query, value = _widths(sizes)
    return {"p": slice(0, 2 * query + 2 * value)}


def _gates(sizes: Mapping[str, int]) -> Fixed:
    query, value = _widths(sizes)
    return {"p": slice(2 * query + value, 2 * query + 2 * value)}


def _rates_and_decays(sizes: Mapping[str, int]) -> Fixed:
    return {"p": slice(-2 * sizes["r"], None)}


def _rates(sizes: Mapping[str, int]) -> Fixed:
    return {"p": slice(-2 * sizes["r"], -sizes["r"])}


def _decays(sizes: Mapping[str, int]) -> Fixed:
    return {"p": slice(-sizes["r"], None)}


def _queries(sizes: Mapping[str, int]) -> Fixed:
    return {"w": slice(0, sizes["x"])}


def _keys(sizes: Mapping[str, int]) -> Fixed:
    return {"w": slice(sizes["x"], 2 * sizes["x"])}


def _values(sizes: Mapping[str, int]) -> Fixed:
    return {"w": slice(2 * sizes["x"], None)}


def _by_kind(axes: str) -> tuple[TensorPattern, ...]:
    """Returns the pieces of a tensor that we order by key head: queries, keys and values of all heads."""
    return tuple(TensorPattern("", axes, places) for places in (_queries, _keys, _values))


_NET = f"{THEIRS}linear_attn."
_IN_PROJ = f"{KEY}self_attention.in_proj.weight"
_TWO_PROJECTIONS = Rule(
    _IN_PROJ,
    "(K p) h",
    (
        TensorPattern(f"{_NET}in_proj_qkvz.weight", "(K p) h", _mixed_and_gates),
        TensorPattern(f"{_NET}in_proj_ba.weight", "(K p) h", _rates_and_decays),
    ),
    _has_delta_net,
)
_FOUR_PROJECTIONS = Rule(
    _IN_PROJ,
    "(K p) h",
    (
        TensorPattern(f"{_NET}in_proj_qkv.weight", "", _mixed, "(K w) h", _by_kind("(K w) h")),
        TensorPattern(f"{_NET}in_proj_z.weight", "(K p) h", _gates),
        TensorPattern(f"{_NET}in_proj_b.weight", "(K p) h", _rates),
        TensorPattern(f"{_NET}in_proj_a.weight", "(K p) h", _decays),
    ),
    _has_delta_net,
)


def _of_net(key: str, name: str, axes: str, keeps_dtype: bool = False) -> Rule:
    rule = in_layer(f"self_attention.{key}", f"linear_attn.{name}", axes).only(_has_delta_net)
    return replace(rule, keeps_dtype=keeps_dtype)


_QUERIES_AND_GATES = TensorPattern(
    # a head's gate follows its query on disk; here the queries of a group come before its gates
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
        # the files hold weight - 1, but for the norm of a delta net's output
        Constant("zero_centered_norm", True),
        _TextRope(),
    )


def _chosen(num_experts: int, top_k: int) -> tuple[Entry, ...]:
    return (
        Field("moe_intermediate_size", "experts.ffn_hidden_size", 512),
        GatedShare(512),
        Field("num_experts", "experts.num_experts", num_experts),
        Field("num_experts_per_tok", "experts.top_k", top_k),
    )


_DEPTH, _AHEAD = "mtp.layers.*.", "mtp."


def _ahead(layer: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Builds the rules of the MTP layer, which has attention, from those of layers.

    Source: vLLM 0.11, models/qwen3_next_mtp.py; transformers leaves these tensors unread.
    """

    def moved(parts: tuple[TensorPattern, ...]) -> tuple[TensorPattern, ...]:
        return tuple(replace(part, name=part.name.replace(THEIRS, f"{_AHEAD}layers.0.")) for part in parts)

    return (
        same(f"{_DEPTH}enorm.weight", f"{_AHEAD}pre_fc_norm_embedding.weight", "h"),
        same(f"{_DEPTH}hnorm.weight", f"{_AHEAD}pre_fc_norm_hidden.weight", "h"),
        same(f"{_DEPTH}eh_proj.weight", f"{_AHEAD}fc.weight", "h j"),
        *(
            replace(
                rule,
                key=rule.key.replace(KEY, f"{_DEPTH}transformer_layer."),
                parts=moved(rule.parts),
                others=tuple(map(moved, rule.others)),
            )
            for rule in layer
        ),
        same(f"{_DEPTH}final_layernorm.weight", f"{_AHEAD}norm.weight", "h"),
    )


def _all(*layer: Rule) -> tuple[Rule, ...]:
    return (*VOCABULARY, *layer, *_ahead(layer))


_INERT = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    (*_entries(2), *_chosen(512, 10), Renormalised(is_default=True), *NO_DENSE_LAYERS),
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
        # of dense layers, which do not exist
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
    "unread": ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    "images": (r"model\.visual\..+",),
}
QWEN3_5_IMAGES = in_tower(
    QWEN3_5,
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    Tower(
        "qwen3_5_text",
        defaults={
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 16,
            "vocab_size": 248320,
        },
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
