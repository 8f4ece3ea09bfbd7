"""Gemma 3 and Gemma 4, with or without images and sound: four norms per layer, GELU gates, and five windowed layers per
wide layer.

Gemma 4 has other heads in wide layers, whose keys are also the values, normalised values, a scalar per layer, capped
logits, and in some models experts next to each dense network.
"""

from dataclasses import replace
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.vision import TrainedTower
from mtrain.hf.schema.config import Constant, Entry, Field, InexpressibleError, Required, heads
from mtrain.hf.schema.families.common import (
    ATTENTION,
    BOTH_KINDS,
    FEED_FORWARD,
    KEY,
    THEIRS,
    VOCABULARY,
    WIDE,
    WINDOWED,
    IsWide,
    Windows,
    common,
    every_nth,
    has_experts,
    in_layer,
    is_dense,
    kinds_of,
    layer_kinds,
    local_base,
    parameters_by_kind,
    router,
    shared_experts,
    windows,
    written_by_kind,
)
from mtrain.hf.schema.family import Family, in_tower
from mtrain.hf.schema.rope import PARTIAL, ROPE_NAMES, older_rope, plain_number, read_rope, written_rope
from mtrain.hf.schema.table import Rule, TensorPattern
from mtrain.hf.schema.tower import Tower, default_sizes
from mtrain.hf.schema.values import needed_value, shown, value_of, wrong_type


def _every_nth(config: dict[str, Any]) -> IsWide:
    number = needed_value(config, _PATTERN, int, 6)
    if number < 1:
        raise DataError(f"config.json: {_PATTERN}={number} must be above 0; correct the file")
    return every_nth(number)(config)


_PATTERN = "sliding_window_pattern"
_WINDOWS = Windows(4096, _every_nth, (_PATTERN,), has_switch=False)


@final
class _Ropes(Entry):
    """Two rotary embeddings; only the one of layers without a window may be scaled."""

    names = (*ROPE_NAMES, "rope_local_base_freq")

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        by_kind = parameters_by_kind(config) or {}
        # rope_scaling applies to layers without a window
        windowed = {"rope_parameters": by_kind.get(WINDOWED)}
        if "rope_local_base_freq" in config:
            windowed["rope_theta"] = config["rope_local_base_freq"]
        # defaults: 1e4 for layers with a window, 1e6 for layers without
        local = local_base(windowed, 1e4)
        fields = read_rope({**config, "rope_parameters": by_kind.get(WIDE)}, 1e6, by_kind=True)
        if _WINDOWS.read(config)["sliding_window"] is not None:
            fields["local_base"] = local
        return {f"rope.{name}": value for name, value in fields.items()}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        # in the file's style, so that the version that wrote it can still read it
        if "rope_theta" in config and "rope_parameters" not in config:
            base = model.rope.base if model.rope.local_base is None else model.rope.local_base
            return written_rope(config, model.rope) | {"rope_local_base_freq": base}
        return written_by_kind(model.rope)

    def older(self, config: dict[str, Any]) -> dict[str, Any]:
        by_kind = config.get("rope_parameters") or {}
        windowed = older_rope(by_kind.get(WINDOWED))
        local = {"rope_local_base_freq": windowed["rope_theta"]} if "rope_theta" in windowed else {}
        return older_rope(by_kind.get(WIDE), by_kind=True) | local


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        *common(tied=True),
        *heads(groups=4, head_dim=256),
        # queries are divided by the root of this number instead of the head's size
        Field("query_pre_attn_scalar", "query_scalar", 256),
        Required("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh"),
        Required("attention_bias", False, False),
        Required("attn_logit_softcapping", None, None),
        Required("final_logit_softcapping", None, None),
        Required("use_bidirectional_attention", False, False, (None,)),
        Constant("activation", "geglu_tanh"),
        Constant("qk_norm", True),
        # files have weight - 1, because Gemma3RMSNorm multiplies by 1 + weight
        Constant("zero_centered_norm", True),
        Constant("sandwich_norm", True),
        # by the root of the hidden size, in the dtype of the weights
        Constant("scale_embeddings", True),
        _WINDOWS,
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
    # the model reads hidden_activation instead of hidden_act
    inert=("hidden_act", "_sliding_window_pattern"),
)
GEMMA3_IMAGES = in_tower(
    GEMMA3,
    "gemma3",
    "Gemma3ForConditionalGeneration",
    Tower(
        "gemma3_text",
        is_tied=True,
        # defaults of Gemma3TextConfig, which published files omit
        defaults=default_sizes(layers=26, hidden=2304, feed_forward=9216, heads=8, vocabulary=262208),
        unread="""mm_tokens_per_image image_token_index boi_token_index eoi_token_index image_token_id boi_token_id
            eoi_token_id initializer_range""",
        trained=TrainedTower(("siglip_vision_model",), image_token=262144, kind="gemma3"),
    ),
)
_EVERY = 6
"""Distance of wide layers if the file lists no layers."""
_BY_LAYER = "per_layer_config"
_SIZES = ("head_dim", "num_key_value_heads")
_EXPERT_SIZES = {"num_experts": "num_experts", "top_k_experts": "top_k", "moe_intermediate_size": "ffn_hidden_size"}


def _kinds(config: dict[str, Any]) -> list[str]:
    kinds = layer_kinds(config, lambda layer: layer % _EVERY == 0)
    return [*kinds[:-1], WIDE]  # transformers always makes the last layer wide


@final
class _LastIsWide(Entry):
    """Kinds of layers, listed by a word per layer; the last layer is wide."""

    names = ("sliding_window", "layer_types")
    part = "sliding_window"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        kinds = _kinds(config)
        if WINDOWED not in kinds:
            raise DataError(f"config.json: layer_types without {WINDOWED} is not supported, but one or more are needed")
        return windows(kinds, value_of(config, "sliding_window", int, 512))

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        kinds = kinds_of(model)
        if kinds[-1] != WIDE:
            raise InexpressibleError("gemma4_text", {"global_attention_every": " with a window in the last layer"})
        return {"sliding_window": model.sliding_window, "layer_types": kinds}


@final
class _WideHeads(Entry):
    """Heads of wide layers, from two fields as in published files, or from one object per layer as in transformers'."""

    names = ("attention_k_eq_v", "global_head_dim", "num_global_key_value_heads", _BY_LAYER)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        if not needed_value(config, "attention_k_eq_v", bool, False):
            raise DataError(
                "config.json: attention_k_eq_v=False (value projections in wide layers) is not supported, but True is "
                "needed"
            )
        groups = needed_value(config, "num_key_value_heads", int, 4)
        wide_groups = value_of(config, "num_global_key_value_heads", int, None)
        named = {
            "head_dim": needed_value(config, "global_head_dim", int, 512),
            "num_key_value_heads": groups if wide_groups is None else wide_groups,
        }
        sizes = named if config.get(_BY_LAYER) is None else self._of_each(config, groups)
        for ours, theirs in zip(_SIZES, ("global_head_dim", "num_global_key_value_heads"), strict=True):
            # transformers reads only one of the two forms
            if config.get(theirs) is not None and named[ours] != sizes[ours]:
                raise DataError(
                    f"config.json: {ours}={sizes[ours]} in {_BY_LAYER} contradicts {theirs}={shown(config[theirs])}; "
                    "remove the wrong one"
                )
        return {
            "global_attention.head_dim": sizes["head_dim"],
            "global_attention.num_query_groups": sizes["num_key_value_heads"],
        }

    def _of_each(self, config: dict[str, Any], groups: int) -> dict[str, int]:
        by_layer = config[_BY_LAYER]
        if not isinstance(by_layer, dict) or not all(isinstance(fields, dict) for fields in by_layer.values()):
            raise wrong_type(_BY_LAYER, by_layer, "an object of objects")
        wide = [str(number) for number, kind in enumerate(_kinds(config)) if kind == WIDE]
        if sorted(by_layer) != sorted(wide) or any(
            fields != by_layer[wide[0]] or fields.keys() - {*_SIZES} for fields in by_layer.values()
        ):
            raise DataError(
                f"config.json: {_BY_LAYER} must have exactly the layers of {WIDE}, {', '.join(wide)}, with the same "
                f"{' and '.join(_SIZES)} and nothing else; correct the file"
            )
        first = by_layer[wide[0]]
        head_dim = needed_value(first, "head_dim", int, needed_value(config, "head_dim", int, 256))
        return {"head_dim": head_dim, "num_key_value_heads": needed_value(first, "num_key_value_heads", int, groups)}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        wide = model.with_global_heads()
        sizes = {"head_dim": wide.head_size, "num_key_value_heads": wide.query_groups}
        fields: dict[str, Any] = {"global_head_dim": wide.head_size, "num_global_key_value_heads": wide.query_groups}
        if _BY_LAYER in config:  # in the file's style
            fields = {name: value for name, value in fields.items() if name in config}
            numbers = [str(number) for number, kind in enumerate(kinds_of(model)) if kind == WIDE]
            fields[_BY_LAYER] = {number: dict(sizes) for number in numbers}
        return {"attention_k_eq_v": True, **fields}


@final
class _WideAndLocalRope(Entry):
    """Two rotary embeddings: windowed layers rotate whole heads, and wide ones some pairs of a head."""

    names = ("rope_parameters",)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        by_kind = config.get("rope_parameters")
        if by_kind is None:
            by_kind = {
                WINDOWED: {"rope_type": "default", "rope_theta": 10000.0},
                WIDE: {"rope_type": "proportional", PARTIAL: 0.25, "rope_theta": 1000000.0},
            }
        is_right = isinstance(by_kind, dict) and {*by_kind} == {WIDE, WINDOWED}
        if not is_right or not all(isinstance(value, dict) for value in by_kind.values()):
            raise DataError(BOTH_KINDS)
        wide, windowed = by_kind[WIDE], by_kind[WINDOWED]
        _check(windowed, WINDOWED, "default", ())
        kind = "default" if wide.get("rope_type") == "default" else "proportional"
        _check(wide, WIDE, kind, () if kind == "default" else (PARTIAL, "factor"))
        fields: dict[str, Any] = {
            "rope.base": needed_value(wide, "rope_theta", float),
            "rope.local_base": needed_value(windowed, "rope_theta", float),
            "rope.scaling": "none" if kind == "default" else kind,
        }
        if kind == "proportional":
            fields["rope.partial"] = needed_value(wide, PARTIAL, float, 1.0)
            fields["rope.factor"] = needed_value(wide, "factor", float, 1.0)
        return fields

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        rope = model.rope
        local = rope.base if rope.local_base is None else rope.local_base
        wide: dict[str, Any] = {"rope_type": "default", "rope_theta": plain_number(rope.base)}
        if rope.scaling == "proportional":
            wide |= {"rope_type": rope.scaling, PARTIAL: rope.partial}
            wide |= {} if rope.factor == 1 else {"factor": rope.factor}
        return {"rope_parameters": {WINDOWED: {"rope_type": "default", "rope_theta": plain_number(local)}, WIDE: wide}}


def _check(parameters: dict[str, Any], kind: str, needed: str, allowed: tuple[str, ...]) -> None:
    rope_type = parameters.get("rope_type")
    if rope_type != needed:
        either = "default" if kind == WINDOWED else "default or proportional"
        raise DataError(f"config.json: rope_type={shown(rope_type)} of {kind} is not supported, but {either} is needed")
    unknown = sorted(parameters.keys() - {"rope_type", "rope_theta", *allowed})
    if unknown:
        raise DataError(
            f"config.json: {unknown[0]}={shown(parameters[unknown[0]])} in the rotary parameters of {kind} has no "
            f"meaning for rope_type={needed}; remove it"
        )


@final
class _Experts(Entry):
    """Experts next to every layer's dense network, which we call a shared expert."""

    names = ("enable_moe_block", *_EXPERT_SIZES)
    part = "experts"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        if not needed_value(config, "enable_moe_block", bool, False):
            return {"experts": None}
        sizes = {f"experts.{ours}": needed_value(config, theirs, int) for theirs, ours in _EXPERT_SIZES.items()}
        # transformers divides a softmax over all experts by the sum of the chosen ones, which is our default
        return sizes | {
            "experts.shared_ffn_hidden_size": needed_value(config, "intermediate_size", int),
            "experts.branch_norms": True,
        }

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        if model.experts is None:
            return {"enable_moe_block": False}
        return {"enable_moe_block": True} | {
            theirs: getattr(model.experts, ours) for theirs, ours in _EXPERT_SIZES.items()
        }


def _is_wide(model: ModelSection, layer: int) -> bool:
    return model.attention(layer) == "global"


def _is_windowed(model: ModelSection, layer: int) -> bool:
    return model.attention(layer) == "grouped"


GEMMA4 = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    (
        *common(tied=True),
        *heads(groups=4, head_dim=256),
        Constant("query_scalar", 1.0),
        Required("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh"),
        Required("attention_bias", False, False),
        Field("final_logit_softcapping", "logit_softcap"),
        # "vision" affects only tokens of images
        Required("use_bidirectional_attention", None, None, ("vision",)),
        # 2B and 4B models have embeddings per layer, and layers that share keys
        Required("hidden_size_per_layer_input", 0, 256),
        Required("num_kv_shared_layers", 0, 0),
        _Experts(),
        Constant("activation", "geglu_tanh"),
        Constant("qk_norm", True),
        Constant("value_norm", True),
        Constant("sandwich_norm", True),
        Constant("layer_scalar", True),
        # by the root of the hidden size, in the dtype of the weights
        Constant("scale_embeddings", True),
        _LastIsWide(),
        _WideHeads(),
        _WideAndLocalRope(),
    ),
    (
        *VOCABULARY,
        in_layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", "h").only(_is_windowed),
        in_layer("input_layernorm.weight", "input_layernorm.weight", "h").only(_is_wide),
        in_layer("self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight", "h"),
        in_layer("mlp.linear_fc1.layer_norm_weight", "pre_feedforward_layernorm.weight", "h").only(is_dense),
        in_layer("mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight", "h"),
        in_layer("scalar", "layer_scalar", "o"),
        *(rule.only(_is_windowed) for rule in ATTENTION),
        Rule(
            f"{KEY}self_attention.linear_qk.weight",
            "(g S D) h",
            (
                TensorPattern(f"{THEIRS}self_attn.q_proj.weight", "(g S D) h", {"S": slice(0, -1)}),
                TensorPattern(f"{THEIRS}self_attn.k_proj.weight", "(g D) h", {"S": -1}),
            ),
            _is_wide,
        ),
        in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "D").only(_is_wide),
        in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "D").only(_is_wide),
        in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "h (H D)").only(_is_wide),
        *FEED_FORWARD,
        in_layer("mlp.shared_input_norm.weight", "pre_feedforward_layernorm.weight", "h").only(has_experts),
        in_layer("mlp.shared_output_norm.weight", "post_feedforward_layernorm_1.weight", "h").only(has_experts),
        in_layer("mlp.routed_input_norm.weight", "pre_feedforward_layernorm_2.weight", "h").only(has_experts),
        in_layer("mlp.routed_output_norm.weight", "post_feedforward_layernorm_2.weight", "h").only(has_experts),
        router("router.proj.weight"),
        in_layer("mlp.router.scale", "router.scale", "h").only(has_experts),
        in_layer("mlp.router.per_expert_scale", "router.per_expert_scale", "E").only(has_experts),
        *shared_experts("mlp"),
        # all experts of a layer in one tensor
        Rule(
            f"{KEY}mlp.experts.experts.linear_fc1.weight",
            "E (c e) h",
            (TensorPattern(f"{THEIRS}experts.gate_up_proj", "E (c e) h"),),
            has_experts,
        ),
        in_layer("mlp.experts.experts.linear_fc2.weight", "experts.down_proj", "E h e").only(has_experts),
    ),
    # the model reads hidden_activation instead, and the others only with embeddings per layer or shared keys
    inert=("hidden_act", "vocab_size_per_layer_input", "use_double_wide_mlp"),
)
GEMMA4_IMAGES = in_tower(
    GEMMA4,
    "gemma4",
    "Gemma4ForConditionalGeneration",
    Tower(
        "gemma4_text",
        is_tied=True,
        # defaults of Gemma4TextConfig, which published files omit
        defaults=default_sizes(layers=30, hidden=2304, feed_forward=9216, heads=8, vocabulary=262144),
        unread="""audio_config audio_token_id boa_token_id boi_token_id eoa_token_index eoi_token_id image_token_id
            initializer_range video_token_id""",
        images=(r"(model\.)?(vision_tower|embed_vision)\..+",),
        trained=TrainedTower(("gemma4_vision",), image_token=258880, kind="gemma4"),
    ),
)
GEMMA4_IMAGES = replace(GEMMA4_IMAGES, carried_names=(r"(model\.)?(audio_tower|embed_audio)\..+",))
FAMILIES = (GEMMA3, GEMMA3_IMAGES, GEMMA4, GEMMA4_IMAGES)
