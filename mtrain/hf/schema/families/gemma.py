"""Gemma-3, with or without images: four zero-centred norms a layer, GELU gates, five windowed layers to a wide one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import Constant, Entry, Field, Required, heads
from mtrain.hf.schema.families.common import (
    ATTENTION,
    FEED_FORWARD,
    VOCABULARY,
    common,
    in_layer,
    kinds_of,
    layer_kinds,
    windows,
)
from mtrain.hf.schema.family import Family, in_tower
from mtrain.hf.schema.rope import ROPE_NAMES, older_rope, read_rope, written_rope
from mtrain.hf.schema.tower import Tower
from mtrain.hf.schema.values import needed_value, value_of

_WIDE, _WINDOWED = "full_attention", "sliding_attention"


@final
@dataclass(frozen=True)
class _GemmaWindows(Entry):
    """Kinds of layers: one word per layer, or the distance of wide layers."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("sliding_window", "sliding_window_pattern", "layer_types")

    @property
    def part(self) -> str:
        return "sliding_window"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        every = needed_value(config, "sliding_window_pattern", int, 6)
        if every < 1:
            raise DataError(f"config.json: sliding_window_pattern={every} must be above 0; correct the file")
        kinds = layer_kinds(config, lambda layer: layer % every == 0)
        return windows(kinds, value_of(config, "sliding_window", int, 4096))

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {"sliding_window": model.sliding_window, "layer_types": kinds_of(model)}


@final
@dataclass(frozen=True)
class _Ropes(Entry):
    """Two rotary embeddings; only that of wide layers may be scaled."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*ROPE_NAMES, "rope_local_base_freq")

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        said = config.get("rope_parameters")
        if said is not None and not (isinstance(said, dict) and said.keys() <= {_WIDE, _WINDOWED}):
            raise DataError(
                f"config.json: rope_parameters must have {_WIDE} and {_WINDOWED} with an object each; correct the file"
            )
        wide = {**config, "rope_parameters": None if said is None else said.get(_WIDE)}
        # the outer scaling is for wide layers
        windowed = {"rope_parameters": None if said is None else said.get(_WINDOWED)}
        if "rope_local_base_freq" in config:
            windowed["rope_theta"] = config["rope_local_base_freq"]
        # defaults by kind of layer: 1e4 with a window, 1e6 without
        local = read_rope(windowed, 1e4, by_kind=True)
        if local["scaling"] != "none":
            raise DataError(f"config.json: rope_type={local['scaling']} of windowed layers must be default")
        found = read_rope(wide, 1e6, by_kind=True)
        if _GemmaWindows().read(config)["sliding_window"] is not None:
            found["local_base"] = local["base"]
        return {f"rope.{name}": value for name, value in found.items()}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        base = model.rope.base if model.rope.local_base is None else model.rope.local_base
        # in the style of the file, so that the version that wrote it can still read it
        if "rope_theta" in config and "rope_parameters" not in config:
            return written_rope(config, model.rope) | {"rope_local_base_freq": base}
        wide = written_rope({}, model.rope)["rope_parameters"]
        return {"rope_parameters": {_WIDE: wide, _WINDOWED: {"rope_theta": base, "rope_type": "default"}}}

    def older(self, config: dict[str, Any]) -> dict[str, Any]:
        said = config.get("rope_parameters") or {}
        windowed = older_rope(said.get(_WINDOWED))
        local = {"rope_local_base_freq": windowed["rope_theta"]} if "rope_theta" in windowed else {}
        return older_rope(said.get(_WIDE), by_kind=True) | local


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        *common(tied=True),
        *heads(groups=4, head_dim=256),
        # queries are divided by its root instead of the root of the head's size
        Field("query_pre_attn_scalar", "query_scalar", 256),
        Required("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh"),
        Required("attention_bias", False, False),
        Required("attn_logit_softcapping", None, None),
        Required("final_logit_softcapping", None, None),
        Required("use_bidirectional_attention", False, False, (None,)),
        Constant("activation", "geglu_tanh"),
        Constant("qk_norm", True),
        # the files hold weight - 1: Gemma3RMSNorm multiplies by 1 + weight
        Constant("zero_centered_norm", True),
        Constant("sandwich_norm", True),
        # scaled by the root of the hidden size, in the dtype of the weights
        Constant("scale_embeddings", True),
        _GemmaWindows(),
        _Ropes(),
    ),
    (
        *VOCABULARY,
        in_layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", "h"),
        in_layer("self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight", "h"),
        in_layer("mlp.linear_fc1.layer_norm_weight", "pre_feedforward_layernorm.weight", "h"),
        in_layer("mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight", "h"),
        *ATTENTION,
        *FEED_FORWARD,
    ),
    # hidden_activation is the field that the model reads
    inert=("hidden_act", "_sliding_window_pattern"),
)
GEMMA3_IMAGES = in_tower(
    GEMMA3,
    "gemma3",
    "Gemma3ForConditionalGeneration",
    Tower(
        "gemma3_text",
        is_tied=True,
        # of Gemma3TextConfig: published files say only what differs
        defaults={
            "num_hidden_layers": 26,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "vocab_size": 262208,
        },
        unread=(
            "mm_tokens_per_image",
            "image_token_index",
            "boi_token_index",
            "eoi_token_index",
            "image_token_id",
            "boi_token_id",
            "eoi_token_id",
            "initializer_range",
        ),
    ),
)
