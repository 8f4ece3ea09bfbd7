"""Gemma-3, text: four zero-centred norms a layer, GELU gates, five windowed layers to a wide one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from mtrain.config.model import ModelSection
from mtrain.errors import DataError
from mtrain.hf.config import Entry, Field, Given, Needed, heads
from mtrain.hf.families.common import ATTENTION, FEED_FORWARD, VOCABULARY, common, in_layer, kinds_of, windows
from mtrain.hf.family import Family
from mtrain.hf.rope import read_rope, rope_parameters, written_rope

_WIDE, _WINDOWED = "full_attention", "sliding_attention"


@final
@dataclass(frozen=True)
class _Windows(Entry):
    """One word for each layer, or which of every so many layers is wide."""

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
        num_layers = config.get("num_hidden_layers", 0)
        kinds = config.get("layer_types") or [_WINDOWED if n % every else _WIDE for n in range(1, num_layers + 1)]
        return windows(kinds, config.get("sliding_window", 4096))

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {"sliding_window": model.sliding_window, "layer_types": kinds_of(model)}


@final
@dataclass(frozen=True)
class _Ropes(Entry):
    """Two rotary embeddings; only that of wide layers may be scaled."""

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        local = self._local(config)
        if local.get("rope_type", "default") != "default":
            raise DataError(f"config.json: rope_type={local['rope_type']} of windowed layers must be default")
        ours = read_rope(config, 1e6, _WIDE) | {"local_base": float(local["rope_theta"])}
        return {f"rope.{name}": value for name, value in ours.items()}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        base = model.rope.base if model.rope.local_base is None else model.rope.local_base
        if "rope_theta" in config and "rope_parameters" not in config:
            return written_rope(config, model.rope) | {"rope_local_base_freq": base}
        wide = written_rope({}, model.rope)["rope_parameters"]
        return {"rope_parameters": {_WIDE: wide, _WINDOWED: {"rope_theta": base, "rope_type": "default"}}}

    def _local(self, config: dict[str, Any]) -> dict[str, Any]:
        if "rope_parameters" in config:
            return rope_parameters(config, 1e4, _WINDOWED)
        return {"rope_theta": config.get("rope_local_base_freq", 1e4)}


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        *common(tied=True),
        *heads(groups=4, head_dim=256),
        Field("query_pre_attn_scalar", "query_scalar", 256),
        Needed("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh"),
        Needed("attention_bias", False, False),
        Needed("attn_logit_softcapping", None, None),
        Needed("final_logit_softcapping", None, None),
        Needed("use_bidirectional_attention", False, False, (None,)),
        Given("activation", "geglu_tanh"),
        Given("qk_norm", True),
        Given("zero_centered_norm", True),
        Given("sandwich_norm", True),
        Given("scale_embeddings", True),
        _Windows(),
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
)
