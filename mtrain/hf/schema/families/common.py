"""Rules and fields of config.json that families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import Constant, Entry, Field, Required
from mtrain.hf.schema.table import Rule, TensorPattern
from mtrain.hf.schema.values import needed_value, value_of

_WIDE, _WINDOWED = "full_attention", "sliding_attention"
MAX_LISTED_LAYERS = 100_000
"""Most layers for which lists are built; a mistyped number would fill the memory."""
KEY, THEIRS = "decoder.layers.*.", "model.layers.{L}."


def untied(model: ModelSection, layer: int) -> bool:
    """Says whether the output layer has its own table."""
    return model.output.has_table


def has_head(model: ModelSection, layer: int) -> bool:
    """Says whether a head replaces the output layer."""
    return model.output.head_rows > 0


def has_qkv_bias(model: ModelSection, layer: int) -> bool:
    """Says whether queries, keys and values have biases."""
    return model.qkv_bias or model.linear_bias


def has_linear_bias(model: ModelSection, layer: int) -> bool:
    """Says whether the other projections have biases."""
    return model.linear_bias


def has_qk_norm(model: ModelSection, layer: int) -> bool:
    """Says whether heads of queries and keys are normalised."""
    return model.qk_norm and model.qk_norm_width == "head"


def has_full_qk_norm(model: ModelSection, layer: int) -> bool:
    """Says whether queries and keys are normalised over all heads."""
    return model.qk_norm and model.qk_norm_width == "full"


def is_dense(model: ModelSection, layer: int) -> bool:
    """Says whether the layer's feed-forward part is dense."""
    return not model.has_experts(layer)


def has_experts(model: ModelSection, layer: int) -> bool:
    """Says whether the layer's feed-forward part is a router and experts."""
    return model.has_experts(layer)


def has_shared_experts(model: ModelSection, layer: int) -> bool:
    """Says whether the layer has shared experts, which every token passes."""
    return model.has_experts(layer) and model.experts is not None and model.experts.shared_ffn_hidden_size > 0


def has_shared_gate(model: ModelSection, layer: int) -> bool:
    """Says whether the layer's shared experts have a gate."""
    return model.has_experts(layer) and model.experts is not None and model.experts.shared_gate


def by_group(kind: str, last: str) -> tuple[TensorPattern, ...]:
    """Returns tensors interleaved by query group: the rows of its queries, then of its key, then of its value."""
    return (
        # megatron-core's linear_qkv is ordered by group (SelfAttention.get_query_key_value_tensors), so that tp cuts
        # whole groups; Hugging Face has three tensors ordered by head.
        TensorPattern(f"{THEIRS}self_attn.q_proj.{kind}", f"(G s d){last}", {"s": slice(0, -2)}),
        TensorPattern(f"{THEIRS}self_attn.k_proj.{kind}", f"(G d){last}", {"s": -2}),
        TensorPattern(f"{THEIRS}self_attn.v_proj.{kind}", f"(G d){last}", {"s": -1}),
    )


def gate_and_up(kind: str, last: str) -> tuple[TensorPattern, ...]:
    """Returns the tensors of a gated projection: the gate's rows, then the other half's."""
    return halves(f"{THEIRS}mlp.gate_proj.{kind}", f"{THEIRS}mlp.up_proj.{kind}", f"f{last}")


def halves(gate: str, up: str, axes: str) -> tuple[TensorPattern, ...]:
    """Returns the two tensors of a gated projection."""
    # linear_fc1 has the gate's rows first, and tp cuts both halves alike
    return (TensorPattern(gate, axes, {"c": 0}), TensorPattern(up, axes, {"c": 1}))


def experts(*modules: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Rule, ...]:
    """Builds the rules of experts; a checkpoint has one tensor with an axis of experts.

    Args:
        modules: Names of their module in files of the family, the usual name first.
        gate: Name of an expert's gate if experts have their own tensors.
        up: Name of the projection that the gate multiplies.
        down: Name of the projection back to the hidden size.
    """
    first: list[tuple[TensorPattern, ...]] = []
    second: list[tuple[TensorPattern, ...]] = []
    for module in modules:
        names = [f"{THEIRS}{module}.experts.{{E}}.{name}.weight" for name in (gate, up, down)]
        first.append(halves(names[0], names[1], "e h"))
        second.append((TensorPattern(names[2], "h e"),))
    for module in modules:  # all experts of a layer in one tensor, as transformers 5 stores them
        first.append((TensorPattern(f"{THEIRS}{module}.experts.gate_up_proj", "E (c e) h"),))
        second.append((TensorPattern(f"{THEIRS}{module}.experts.down_proj", "E h e"),))
    ours = f"{KEY}mlp.experts.experts.linear"
    return (
        # the axis of experts is global: each expert-parallel rank reads its own stretch of it
        Rule(f"{ours}_fc1.weight", "E (c e) h", first[0], has_experts, others=tuple(first[1:])),
        Rule(f"{ours}_fc2.weight", "E h e", second[0], has_experts, others=tuple(second[1:])),
    )


def shared_experts(module: str = "mlp.shared_experts") -> tuple[Rule, ...]:
    """Builds the rules of shared experts in `module`."""
    first = halves(f"{THEIRS}{module}.gate_proj.weight", f"{THEIRS}{module}.up_proj.weight", "t h")
    ours = "mlp.shared_experts.linear"
    return (
        Rule(f"{KEY}{ours}_fc1.weight", "(c t) h", first, has_shared_experts),
        in_layer(f"{ours}_fc2.weight", f"{module}.down_proj.weight", "h t").only(has_shared_experts),
    )


def router(*names: str) -> Rule:
    """Builds the rule of the router's weights; the family's usual name comes first."""
    parts = [(TensorPattern(THEIRS + name, "E h"),) for name in names]
    return Rule(f"{KEY}mlp.router.weight", "E h", parts[0], has_experts, others=tuple(parts[1:]))


def same(key: str, name: str, axes: str) -> Rule:
    """Builds the rule of a tensor that is identical on both sides."""
    return Rule(key, axes, (TensorPattern(name, axes),))


def in_layer(key: str, name: str, axes: str) -> Rule:
    """Builds the rule of a layer's tensor that is identical on both sides."""
    return same(KEY + key, THEIRS + name, axes)


VOCABULARY = (
    same("embedding.word_embeddings.weight", "model.embed_tokens.weight", "V h"),
    same("decoder.final_layernorm.weight", "model.norm.weight", "h"),
    same("output_layer.weight", "lm_head.weight", "V h").only(untied),
    same("output_layer.weight", "score.weight", "n h").only(has_head),
)
NORMS = (
    # norms have TransformerEngine's fused names with every backend, so a checkpoint does not depend on it
    in_layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", "h"),
    in_layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", "h").only(is_dense),
    # a router and all experts read the normed input, so the norm is not fused with one linear
    in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "h").only(has_experts),
)
ATTENTION = (
    Rule(f"{KEY}self_attention.linear_qkv.weight", "(G s d) h", by_group("weight", " h")),
    Rule(f"{KEY}self_attention.linear_qkv.bias", "(G s d)", by_group("bias", ""), has_qkv_bias),
    in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "d").only(has_qk_norm),
    in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "d").only(has_qk_norm),
    in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "(H d)").only(has_full_qk_norm),
    in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "(G d)").only(has_full_qk_norm),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "h (H d)"),
    in_layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias", "h").only(has_linear_bias),
)
FEED_FORWARD = (
    Rule(f"{KEY}mlp.linear_fc1.weight", "(c f) h", gate_and_up("weight", " h"), is_dense),
    Rule(f"{KEY}mlp.linear_fc1.bias", "(c f)", gate_and_up("bias", ""), is_dense).only(has_linear_bias),
    in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", "h f").only(is_dense),
    in_layer("mlp.linear_fc2.bias", "mlp.down_proj.bias", "h").only(is_dense).only(has_linear_bias),
)
ACTIVATION = (Required("hidden_act", "silu", "silu", ("swish",)), Constant("activation", "swiglu"))


def common(norm_epsilon: float = 1e-6, tied: bool = False) -> tuple[Entry, ...]:
    """Returns the fields of every family.

    Args:
        norm_epsilon: Epsilon of norms if the file has none.
        tied: Whether input and output share a table if the file does not say.
    """
    return (
        Field("num_hidden_layers", "num_layers"),
        Field("hidden_size", "hidden_size"),
        Field("intermediate_size", "ffn_hidden_size"),
        Field("num_attention_heads", "num_attention_heads"),
        Field("vocab_size", "vocab_size"),
        Field("rms_norm_eps", "norm_epsilon", norm_epsilon),
        Field("tie_word_embeddings", "tied_embeddings", tied),
        Field("initializer_range", "init_std", 0.02),
        Field("attention_dropout", "attention_dropout", 0.0),
    )


@final
@dataclass(frozen=True)
class LayerWindows(Entry):
    """Layers with a sliding window: one word per layer, or a number of first layers."""

    alternates: bool = False
    """Whether every other one of the first layers has a window, instead of all layers after them."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

    @property
    def part(self) -> str:
        return "sliding_window"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        window = value_of(config, "sliding_window", int, 4096)
        # a window that is switched off is still written in the files of this family
        window = window if needed_value(config, "use_sliding_window", bool, False) else None
        first = needed_value(config, "max_window_layers", int, 28)

        def is_wide(layer: int) -> bool:  # transformers counts from 0, `layer_kinds` from 1
            return layer % 2 == 0 or layer > first if self.alternates else layer <= first

        kinds = layer_kinds(config, lambda layer: window is None or is_wide(layer))
        return windows(kinds, window, "use_sliding_window is false")

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        window, kinds = model.sliding_window, kinds_of(model)
        # read where layer_types is missing, as in files of older programs
        first = kinds.index(_WINDOWED) if _WINDOWED in kinds else model.num_layers
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            **({} if self.alternates else {"max_window_layers": first}),
            "layer_types": kinds,
        }


@final
@dataclass(frozen=True)
class ListedWindows(Entry):
    """Layers with a sliding window: one word per layer, or a pattern of the family."""

    every: int
    """Distance of layers without a window if the file lists no layers."""
    window: int
    """Tokens in a window if the file does not say."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("sliding_window", "layer_types")

    @property
    def part(self) -> str:
        return "sliding_window"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        kinds = layer_kinds(config, lambda layer: layer % self.every == 0)
        return windows(kinds, value_of(config, "sliding_window", int, self.window))

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {"sliding_window": model.sliding_window, "layer_types": kinds_of(model)}


def kinds_of(model: ModelSection) -> list[str]:
    """Returns `full_attention` or `sliding_attention` for each layer."""
    window, every = model.sliding_window, model.global_attention_every
    return [
        _WIDE if window is None or (every is not None and layer % every == 0) else _WINDOWED
        for layer in range(1, model.num_layers + 1)
    ]


def layer_kinds(config: dict[str, Any], is_wide: Callable[[int], bool]) -> list[str]:
    """Reads `full_attention` or `sliding_attention` for each layer from the file.

    Args:
        is_wide: Says whether a layer, counted from 1, has no window; used if the file lists no layers.

    Raises:
        DataError: The list has a wrong length or unknown words.
    """
    num_layers = needed_value(config, "num_hidden_layers", int)
    kinds = config.get("layer_types")
    if kinds is None:
        # checked before the list is made; where the file lists the layers, its own length limits the number
        if num_layers > MAX_LISTED_LAYERS:
            raise DataError(f"config.json: num_hidden_layers={num_layers} is more than any model has; correct the file")
        return [_WIDE if is_wide(layer) else _WINDOWED for layer in range(1, num_layers + 1)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in (_WIDE, _WINDOWED) for kind in kinds):
        raise DataError(
            f"config.json: layer_types must list {_WIDE} or {_WINDOWED} for each of num_hidden_layers={num_layers} "
            "layers; correct the file"
        )
    return kinds


def windows(kinds: list[str], window: int | None, why_none: str = "sliding_window is null") -> dict[str, Any]:
    """Returns our fields of windows for layers that are `full_attention` or `sliding_attention`.

    Args:
        window: Tokens in a window, if any.
        why_none: Why there is no window, for the message.

    Raises:
        DataError: The layers without a window are not all, none, or every n-th one.
    """
    wide = [layer for layer, kind in enumerate(kinds, start=1) if kind == _WIDE]
    if len(wide) == len(kinds):
        return {"sliding_window": None, "global_attention_every": None}
    if window is None:
        raise DataError(f"config.json: layer_types lists {_WINDOWED}, but {why_none}; correct the file")
    if not wide:
        return {"sliding_window": window, "global_attention_every": None}
    # ours is one number, every n-th layer; model.* cannot express any other order
    if wide != list(range(wide[0], len(kinds) + 1, wide[0])) or wide[0] == 1:
        raise DataError(
            "config.json: layer_types must have a window in all layers, in none, or in all but every n-th; layers "
            f"{', '.join(map(str, wide))} of {len(kinds)} have none"
        )
    return {"sliding_window": window, "global_attention_every": wide[0]}
