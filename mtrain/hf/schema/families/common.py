"""Rules for tensors and fields of config.json that families share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.rope import RopeSection
from mtrain.hf.schema.config import Constant, Entry, Field, Required
from mtrain.hf.schema.rope import read_rope, written_rope
from mtrain.hf.schema.table import Rule, TensorPattern
from mtrain.hf.schema.values import needed_value, value_of

WIDE, WINDOWED = "full_attention", "sliding_attention"
BOTH_KINDS = f"config.json: rope_parameters must have {WIDE} and {WINDOWED} with an object each; correct the file"
MAX_LISTED_LAYERS = 100_000
"""Limit on layers for which lists are built, because a mistyped number would fill the memory."""
KEY, THEIRS = "decoder.layers.*.", "model.layers.{L}."


def has_linear_bias(model: ModelSection, layer: int) -> bool:
    """Returns whether all projections have biases."""
    return model.linear_bias


def has_qk_norm(model: ModelSection, layer: int) -> bool:
    """Returns whether heads of queries and keys are normalised."""
    return model.qk_norm and model.qk_norm_width == "head"


def has_full_qk_norm(model: ModelSection, layer: int) -> bool:
    """Returns whether queries and keys are normalised over all heads."""
    return model.qk_norm and model.qk_norm_width == "full"


def is_dense(model: ModelSection, layer: int) -> bool:
    """Returns whether the layer's feed-forward part is dense."""
    return not model.has_experts(layer)


def has_experts(model: ModelSection, layer: int) -> bool:
    """Returns whether the layer's feed-forward part is a router and experts."""
    return model.has_experts(layer)


def has_shared_experts(model: ModelSection, layer: int) -> bool:
    """Returns whether the layer has shared experts, which process every token."""
    return model.has_experts(layer) and model.experts is not None and model.experts.shared_ffn_hidden_size > 0


def has_shared_gate(model: ModelSection, layer: int) -> bool:
    """Returns whether the layer's shared experts have a gate."""
    return model.has_experts(layer) and model.experts is not None and model.experts.shared_gate


def by_group(kind: str, last: str) -> tuple[TensorPattern, ...]:
    """Returns the tensors of queries, keys and values, which a checkpoint interleaves by query group."""
    return (
        # megatron-core's linear_qkv is ordered by group (SelfAttention.get_query_key_value_tensors), so that tp splits
        # whole groups; Hugging Face has three tensors ordered by head
        TensorPattern(f"{THEIRS}self_attn.q_proj.{kind}", f"(G s d){last}", {"s": slice(0, -2)}),
        TensorPattern(f"{THEIRS}self_attn.k_proj.{kind}", f"(G d){last}", {"s": -2}),
        TensorPattern(f"{THEIRS}self_attn.v_proj.{kind}", f"(G d){last}", {"s": -1}),
    )


def gate_and_up(kind: str, last: str) -> tuple[TensorPattern, ...]:
    """Returns the tensors of a dense gated projection, gate and up."""
    return halves(f"{THEIRS}mlp.gate_proj.{kind}", f"{THEIRS}mlp.up_proj.{kind}", f"f{last}")


def halves(gate: str, up: str, axes: str) -> tuple[TensorPattern, ...]:
    """Returns the two tensors of a gated projection, which a checkpoint stacks."""
    # linear_fc1 has the gate's rows first, and tp splits both halves alike
    return (TensorPattern(gate, axes, {"c": 0}), TensorPattern(up, axes, {"c": 1}))


def experts(*modules: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Rule, ...]:
    """Builds the rules of experts, which a checkpoint stacks along an axis.

    `modules` begins with their module's usual name; `gate` gates `up`, and `down` projects back.
    """
    first: list[tuple[TensorPattern, ...]] = []
    second: list[tuple[TensorPattern, ...]] = []
    for module in modules:
        names = [f"{THEIRS}{module}.experts.{{E}}.{name}.weight" for name in (gate, up, down)]
        first.append(halves(names[0], names[1], "e h"))
        second.append((TensorPattern(names[2], "h e"),))
    for module in modules:  # transformers 5 stores all experts of a layer in one tensor
        first.append((TensorPattern(f"{THEIRS}{module}.experts.gate_up_proj", "E (c e) h"),))
        second.append((TensorPattern(f"{THEIRS}{module}.experts.down_proj", "E h e"),))
    ours = f"{KEY}mlp.experts.experts.linear"
    return (
        # each expert-parallel rank reads its part of the axis of experts
        Rule(f"{ours}_fc1.weight", "E (c e) h", first[0], has_experts, alternatives=tuple(first[1:])),
        Rule(f"{ours}_fc2.weight", "E h e", second[0], has_experts, alternatives=tuple(second[1:])),
    )


def shared_experts(module: str = "mlp.shared_experts") -> tuple[Rule, ...]:
    """Builds the rules of the shared experts in `module`."""
    first = halves(f"{THEIRS}{module}.gate_proj.weight", f"{THEIRS}{module}.up_proj.weight", "t h")
    ours = "mlp.shared_experts.linear"
    return (
        Rule(f"{KEY}{ours}_fc1.weight", "(c t) h", first, has_shared_experts),
        in_layer(f"{ours}_fc2.weight", f"{module}.down_proj.weight", "h t").only(has_shared_experts),
    )


def router(*names: str) -> Rule:
    """Builds the rule of the router's weight; `names` begins with the family's usual name."""
    parts = [(TensorPattern(THEIRS + name, "E h"),) for name in names]
    return Rule(f"{KEY}mlp.router.weight", "E h", parts[0], has_experts, alternatives=tuple(parts[1:]))


def same(key: str, name: str, axes: str) -> Rule:
    """Builds the rule of a tensor that is the same on both sides, outside layers."""
    return Rule(key, axes, (TensorPattern(name, axes),))


def in_layer(key: str, name: str, axes: str) -> Rule:
    """Builds the rule of a layer's tensor that is the same on both sides."""
    return same(KEY + key, THEIRS + name, axes)


def ahead(
    layer: tuple[Rule, ...], enorm: str, hnorm: str, eh_proj: str, norm: str, base: str = THEIRS
) -> tuple[Rule, ...]:
    """Builds the rules of MTP depths, each with a whole layer, from the rules of a layer.

    Takes the names of the norms of embeddings and hidden states, of the projection of both, and of the norm after the
    layer; `base` is the prefix of names in the layer.
    """
    depth = "mtp.layers.*."

    def moved(parts: tuple[TensorPattern, ...]) -> tuple[TensorPattern, ...]:
        return tuple(replace(part, name=part.name.replace(THEIRS, base)) for part in parts)

    def inside(rule: Rule) -> Rule:
        key = rule.key.replace(KEY, f"{depth}transformer_layer.")
        return replace(rule, key=key, parts=moved(rule.parts), alternatives=tuple(map(moved, rule.alternatives)))

    return (
        same(f"{depth}enorm.weight", enorm, "h"),
        same(f"{depth}hnorm.weight", hnorm, "h"),
        same(f"{depth}eh_proj.weight", eh_proj, "h j"),
        *map(inside, layer),
        same(f"{depth}final_layernorm.weight", norm, "h"),
    )


VOCABULARY = (
    same("embedding.word_embeddings.weight", "model.embed_tokens.weight", "V h"),
    same("decoder.final_layernorm.weight", "model.norm.weight", "h"),
    same("output_layer.weight", "lm_head.weight", "V h").only(lambda model, layer: model.output.has_table),
    same("output_layer.weight", "score.weight", "n h").only(lambda model, layer: model.output.head_rows > 0),
)
NORMS = (
    # norms have TransformerEngine's fused names with every backend, so that checkpoints do not depend on it
    in_layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", "h"),
    in_layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", "h").only(is_dense),
    # the router and all experts read the normed input, so the norm is not fused with a linear layer
    in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "h").only(has_experts),
)
ATTENTION = (
    Rule(f"{KEY}self_attention.linear_qkv.weight", "(G s d) h", by_group("weight", " h")),
    Rule(f"{KEY}self_attention.linear_qkv.bias", "(G s d)", by_group("bias", "")).only(
        lambda model, layer: model.qkv_bias or model.linear_bias
    ),
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
    """Returns the entries that every family has; the arguments are the family's defaults."""
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


IsWide = Callable[[int], bool]
"""Returns whether a layer, counted from 1, has no window."""
FIRST = "max_window_layers"
"""Field with the number of first layers that a rule treats differently."""


@final
@dataclass(frozen=True)
class Windows(Entry):
    """Layers with a sliding window, from a list with a word per layer or from the family's rule."""

    default: int | None
    """Tokens in a window if the file has no number."""
    rule: Callable[[dict[str, Any]], IsWide] | None
    """Rule for files that do not list layers; None if all layers have windows, and the family reads no list."""
    rule_fields: tuple[str, ...] = ()
    """Fields that the rule reads and no other entry does."""
    has_switch: bool = True
    """Whether `use_sliding_window` switches windows on."""
    counts_first: bool = False
    """Whether other programs read the number of first layers without a window."""

    part = "sliding_window"

    @property
    def names(self) -> tuple[str, ...]:
        switch = ("use_sliding_window",) if self.has_switch else ()
        return (*switch, "sliding_window", *self.rule_fields, *(("layer_types",) if self.rule is not None else ()))

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        window = value_of(config, "sliding_window", int, self.default)
        # files of these families have a window even if it is switched off
        if self.has_switch and not needed_value(config, "use_sliding_window", bool, False):
            window = None
        if self.rule is None:
            return {"sliding_window": window}
        is_wide = self.rule(config)
        has_none = self.has_switch and window is None
        kinds = layer_kinds(config, lambda layer: has_none or is_wide(layer))
        switched_off = "use_sliding_window is false or sliding_window null"
        return windows(kinds, window, switched_off if self.has_switch else "sliding_window is null")

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        changes: dict[str, Any] = {"use_sliding_window": model.sliding_window is not None} if self.has_switch else {}
        changes["sliding_window"] = model.sliding_window
        kinds = kinds_of(model)
        if self.counts_first:  # for programs that do not read layer_types
            changes[FIRST] = kinds.index(WINDOWED) if WINDOWED in kinds else model.num_layers
        if self.rule is not None:
            changes["layer_types"] = kinds
        return changes


def every_nth(number: int) -> Callable[[dict[str, Any]], IsWide]:
    """Returns the rule that every n-th layer has no window."""
    return lambda config: lambda layer: layer % number == 0


def _after_the_first(config: dict[str, Any]) -> IsWide:
    # transformers counts from 0
    first = needed_value(config, FIRST, int, 28)
    return lambda layer: layer <= first


def alternating_first(config: dict[str, Any]) -> IsWide:
    """Returns a rule: every other one of the first layers has a window, and no later layer has one."""
    first = needed_value(config, FIRST, int, 28)
    return lambda layer: layer % 2 == 0 or layer > first


QWEN_WINDOWS = Windows(4096, _after_the_first, (FIRST,), counts_first=True)


def kinds_of(model: ModelSection) -> list[str]:
    """Returns `full_attention` or `sliding_attention` for each of a model's layers."""
    window, every = model.sliding_window, model.global_attention_every
    return [
        WIDE if window is None or (every is not None and layer % every == 0) else WINDOWED
        for layer in range(1, model.num_layers + 1)
    ]


def layer_kinds(config: dict[str, Any], is_wide: Callable[[int], bool]) -> list[str]:
    """Reads `full_attention` or `sliding_attention` for each layer; `is_wide` decides if the file lists no layers."""
    num_layers = needed_value(config, "num_hidden_layers", int)
    kinds = config.get("layer_types")
    if kinds is None:
        # checked before the list is built; a list in the file limits the number by its length
        if num_layers > MAX_LISTED_LAYERS:
            raise DataError(f"config.json: num_hidden_layers={num_layers} is too large; correct the file")
        return [WIDE if is_wide(layer) else WINDOWED for layer in range(1, num_layers + 1)]
    return listed_kinds(kinds, num_layers, (WIDE, WINDOWED))


def listed_kinds(kinds: object, num_layers: int, words: tuple[str, str]) -> list[str]:
    """Checks that `layer_types` has one of two words for each layer, and returns it."""
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in words for kind in kinds):
        raise DataError(
            f"config.json: layer_types must list {' or '.join(words)} for each of "
            f"num_hidden_layers={counted(num_layers, 'layer')}; correct the file"
        )
    return kinds


def parameters_by_kind(config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the rotary parameters by kind of layer; None without `rope_parameters`."""
    parameters = config.get("rope_parameters")
    if parameters is not None and not (isinstance(parameters, dict) and parameters.keys() <= {WIDE, WINDOWED}):
        raise DataError(BOTH_KINDS)
    return parameters


def local_base(config: dict[str, Any], default: float) -> float:
    """Reads the rotary base of windowed layers, whose parameters must not be scaled."""
    local = read_rope(config, default)
    if local["scaling"] != "none":
        raise DataError(
            f"config.json: rope_type={local['scaling']} is not supported in windowed layers, but default is needed"
        )
    base: float = local["base"]
    return base


def written_by_kind(rope: RopeSection) -> dict[str, Any]:
    """Returns `rope_parameters` for both kinds of layer."""
    windowed = {"rope_theta": rope.base if rope.local_base is None else rope.local_base, "rope_type": "default"}
    return {"rope_parameters": {WIDE: written_rope({}, rope)["rope_parameters"], WINDOWED: windowed}}


def windows(kinds: list[str], window: int | None, why_none: str = "sliding_window is null") -> dict[str, Any]:
    """Converts kinds of layers, `full_attention` or `sliding_attention`, to our fields of windows; `why_none` is the
    reason, in a message, why `window` is None."""
    wide = [layer for layer, kind in enumerate(kinds, start=1) if kind == WIDE]
    if len(wide) == len(kinds):
        return {"sliding_window": None, "global_attention_every": None}
    if window is None:
        raise DataError(f"config.json: layer_types lists {WINDOWED}, but {why_none}; correct the file")
    if not wide:
        return {"sliding_window": window, "global_attention_every": None}
    # model.* has one number, every n-th layer, and cannot express any other order
    if wide != list(range(wide[0], len(kinds) + 1, wide[0])) or wide[0] == 1:
        raise DataError(
            "config.json: layer_types must have a window in all layers, in none, or in all but every n-th; layers "
            f"{', '.join(map(str, wide))} of {len(kinds)} have none"
        )
    return {"sliding_window": window, "global_attention_every": wide[0]}
