"""Llama 3.x, Mistral, Qwen2.5 and Qwen3: one architecture in four dialects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from mtrain.config.model import ModelSection
from mtrain.errors import DataError
from mtrain.hf.config import Entry, Field, Given, Needed, Rope, heads
from mtrain.hf.family import Family
from mtrain.hf.table import Part, Rule

_KEY, _THEIRS = "decoder.layers.*.", "model.layers.{L}."


def untied(model: ModelSection, layer: int) -> bool:
    """Whether the output layer has a table of its own."""
    return not model.tied_embeddings


def has_qkv_bias(model: ModelSection, layer: int) -> bool:
    """Whether queries, keys and values have biases."""
    return model.qkv_bias or model.linear_bias


def has_linear_bias(model: ModelSection, layer: int) -> bool:
    """Whether the other projections have biases."""
    return model.linear_bias


def has_qk_norm(model: ModelSection, layer: int) -> bool:
    """Whether queries and keys are normalised."""
    return model.qk_norm


def is_dense(model: ModelSection, layer: int) -> bool:
    """Whether the layer's feed-forward part is a plain one."""
    return not model.has_experts(layer)


def _by_group(kind: str, last: str) -> tuple[Part, ...]:
    """Of each query group: the rows of its queries, then of its key, then of its value."""
    return (
        Part(f"{_THEIRS}self_attn.q_proj.{kind}", f"(G s d){last}", {"s": slice(0, -2)}),
        Part(f"{_THEIRS}self_attn.k_proj.{kind}", f"(G d){last}", {"s": -2}),
        Part(f"{_THEIRS}self_attn.v_proj.{kind}", f"(G d){last}", {"s": -1}),
    )


def _gate_and_up(kind: str, last: str) -> tuple[Part, ...]:
    return tuple(
        Part(f"{_THEIRS}mlp.{name}_proj.{kind}", f"f{last}", {"c": place}) for place, name in enumerate(("gate", "up"))
    )


def same(key: str, name: str, axes: str) -> Rule:
    """A tensor that is the same on both sides."""
    return Rule(key, axes, (Part(name, axes),))


def _in_layer(key: str, name: str, axes: str) -> Rule:
    return same(_KEY + key, _THEIRS + name, axes)


def _if(condition: Any, rule: Rule) -> Rule:
    return Rule(rule.key, rule.axes, rule.parts, condition)


VOCABULARY = (
    same("embedding.word_embeddings.weight", "model.embed_tokens.weight", "V h"),
    same("decoder.final_layernorm.weight", "model.norm.weight", "h"),
    _if(untied, same("output_layer.weight", "lm_head.weight", "V h")),
)
ATTENTION = (
    _in_layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", "h"),
    Rule(f"{_KEY}self_attention.linear_qkv.weight", "(G s d) h", _by_group("weight", " h")),
    Rule(f"{_KEY}self_attention.linear_qkv.bias", "(G s d)", _by_group("bias", ""), has_qkv_bias),
    _if(has_qk_norm, _in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "d")),
    _if(has_qk_norm, _in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "d")),
    _in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "h (H d)"),
    _if(has_linear_bias, _in_layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias", "h")),
)
FEED_FORWARD = (
    _if(is_dense, _in_layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", "h")),
    Rule(f"{_KEY}mlp.linear_fc1.weight", "(c f) h", _gate_and_up("weight", " h"), is_dense),
    Rule(f"{_KEY}mlp.linear_fc1.bias", "(c f)", _gate_and_up("bias", ""), has_linear_bias),
    _if(is_dense, _in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", "h f")),
    _if(has_linear_bias, _in_layer("mlp.linear_fc2.bias", "mlp.down_proj.bias", "h")),
)
_RULES = (*VOCABULARY, *ATTENTION, *FEED_FORWARD)

ACTIVATION = (Needed("hidden_act", "silu", "silu", ("swish",)), Given("activation", "swiglu"))
COMMON: tuple[Entry, ...] = (
    Field("num_hidden_layers", "num_layers"),
    Field("hidden_size", "hidden_size"),
    Field("intermediate_size", "ffn_hidden_size"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("vocab_size", "vocab_size"),
    Field("rms_norm_eps", "norm_epsilon", 1e-6),
    Field("tie_word_embeddings", "tied_embeddings", False),
    Field("initializer_range", "init_std", 0.02),
    Field("attention_dropout", "attention_dropout", 0.0),
)


@final
@dataclass(frozen=True)
class _LlamaBiases(Entry):
    """Llama has biases in attention and in the feed-forward part, in both or in neither."""

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        attention, feed_forward = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
        if attention != feed_forward:
            raise DataError(
                f"config.json: attention_bias={attention} with mlp_bias={feed_forward} is not supported; both must "
                "be the same"
            )
        return {"linear_bias": attention}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {"attention_bias": model.linear_bias, "mlp_bias": model.linear_bias}


@final
@dataclass(frozen=True)
class LayerWindows(Entry):
    """Which layers have a sliding window: one word for each layer, or the number of layers without one."""

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        num_layers, window = config.get("num_hidden_layers", 0), config.get("sliding_window", 4096)
        first = config.get("max_window_layers", 28) if config.get("use_sliding_window") else num_layers
        kinds = config.get("layer_types") or [
            "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
        ]
        return windows(kinds, window)

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        window, every = model.sliding_window, model.global_attention_every
        kinds = [
            "full_attention" if window is None or (every and (layer + 1) % every == 0) else "sliding_attention"
            for layer in range(model.num_layers)
        ]
        first = kinds.index("sliding_attention") if "sliding_attention" in kinds else model.num_layers
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": first,
            "layer_types": kinds,
        }


def windows(kinds: list[str], window: int | None) -> dict[str, Any]:
    """Our window fields of layers that are `full_attention` or `sliding_attention`.

    Raises:
        DataError: The order is not all, none, or every n-th layer without a window.
    """
    wide = [layer for layer, kind in enumerate(kinds, start=1) if kind == "full_attention"]
    if len(wide) == len(kinds):
        return {"sliding_window": None, "global_attention_every": None}
    if not wide:
        return {"sliding_window": window, "global_attention_every": None}
    if wide != list(range(wide[0], len(kinds) + 1, wide[0])) or wide[0] == 1:
        raise DataError(
            "config.json: layer_types must have a window in all layers, in none, or in all but every n-th; layers "
            f"{', '.join(map(str, wide))} of {len(kinds)} have none"
        )
    return {"sliding_window": window, "global_attention_every": wide[0]}


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (
        *COMMON,
        *ACTIVATION,
        *heads(),
        _LlamaBiases(),
        Rope(),
    ),
    _RULES,
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    (
        *COMMON,
        *ACTIVATION,
        *heads(groups=8),
        Field("sliding_window", "sliding_window", 4096),
        Rope(),
    ),
    _RULES,
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    (
        *COMMON,
        *ACTIVATION,
        *heads(groups=32),
        Given("qkv_bias", True),
        LayerWindows(),
        Rope(),
    ),
    _RULES,
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (
        *COMMON,
        *ACTIVATION,
        *heads(groups=32, head_dim=128),
        Needed("attention_bias", False, False),
        Given("qk_norm", True),
        LayerWindows(),
        Rope(),
    ),
    _RULES,
)
