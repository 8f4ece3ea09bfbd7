"""Llama 3.x, Mistral and Ministral 3, Qwen2.5, Qwen3 and Qwen3-VL, SmolLM3 and Phi: variants of one architecture."""

from dataclasses import dataclass, replace
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.vision import TrainedTower
from mtrain.hf.schema.config import Constant, Entry, Field, Required, Rope, heads, skipped_rotations
from mtrain.hf.schema.families.common import (
    ACTIVATION,
    ATTENTION,
    FEED_FORWARD,
    KEY,
    MAX_LISTED_LAYERS,
    NORMS,
    QWEN_WINDOWS,
    THEIRS,
    VOCABULARY,
    IsWide,
    Windows,
    by_group,
    common,
    in_layer,
)
from mtrain.hf.schema.family import Family, in_tower
from mtrain.hf.schema.rope import ROPE_NAMES, ROPE_OBJECTS, rope_without
from mtrain.hf.schema.table import Rule, TensorPattern
from mtrain.hf.schema.tower import Tower, default_sizes
from mtrain.hf.schema.values import needed_value, shown, value_of

_HEAD, _TOKENS = "ForSequenceClassification", "ForCausalLM"


@final
@dataclass(frozen=True)
class Labels(Entry):
    """Head of `LlamaForSequenceClassification` and others: `score.weight` on the last token, one row per label."""

    prefix: str
    """Prefix of the class name in transformers."""

    names = ("architectures", "num_labels", "id2label", "label2id")

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        if not _has_head(config):
            return {"num_labels": None}
        labels = config.get("id2label")
        if labels is not None and not isinstance(labels, dict):
            raise DataError(f"config.json: id2label={shown(labels)} must be an object of numbers and names; correct it")
        # transformers counts the names, or uses num_labels, by default 2
        return {"num_labels": len(labels) if labels else value_of(config, "num_labels", int, 2)}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        labels = model.output.head_rows
        if not labels:
            return {"architectures": [f"{self.prefix}{_TOKENS}"]} if _has_head(config) else {}
        names = {str(number): f"LABEL_{number}" for number in range(labels)}
        return {
            "architectures": [f"{self.prefix}{_HEAD}"],
            "id2label": names,
            "label2id": {name: int(number) for number, name in names.items()},
        }


def _has_head(config: dict[str, Any]) -> bool:
    classes = config.get("architectures")
    return isinstance(classes, list) and any(isinstance(name, str) and name.endswith(_HEAD) for name in classes)


_RULES = (*VOCABULARY, *NORMS, *ATTENTION, *FEED_FORWARD)


@final
class LlamaBiases(Entry):
    """Llama's biases, in both attention and the feed-forward part or in neither."""

    names = ("attention_bias", "mlp_bias")

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        attention, feed_forward = (needed_value(config, name, bool, False) for name in self.names)
        # megatron-core has one switch for both (add_bias_linear)
        if attention != feed_forward:
            raise DataError(
                f"config.json: attention_bias={attention} with mlp_bias={feed_forward} is not supported, but equal "
                "values are needed"
            )
        return {"linear_bias": attention}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {"attention_bias": model.linear_bias, "mlp_bias": model.linear_bias}


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (
        Labels("Llama"),
        *common(),
        *ACTIVATION,
        *heads(),
        LlamaBiases(),
        Rope(),
    ),
    _RULES,
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    (
        Labels("Mistral"),
        *common(),
        *ACTIVATION,
        # MistralConfig's default
        *heads(groups=8),
        # a missing field means 4096, as in transformers; null means no window
        Field("sliding_window", "sliding_window", 4096),
        Rope(),
    ),
    _RULES,
)
MISTRAL3 = in_tower(
    # without Labels
    replace(MISTRAL, entries=MISTRAL.entries[1:]),
    "mistral3",
    "Mistral3ForConditionalGeneration",
    Tower(
        "mistral",
        is_tied=False,
        # defaults of MistralConfig
        defaults=default_sizes(layers=32, hidden=4096, feed_forward=14336, heads=32, vocabulary=32000),
        unread="""image_token_index image_token_id multimodal_projector_bias projector_hidden_act spatial_merge_size
            vision_feature_layer""",
        other_types=("ministral3",),
        trained=TrainedTower(("pixtral",), image_token=10, kind="mistral3"),
    ),
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    (
        Labels("Qwen2"),
        *common(),
        *ACTIVATION,
        *heads(groups=32),
        # files have no such field, because Qwen2Attention always has biases
        Constant("qkv_bias", True),
        QWEN_WINDOWS,
        Rope(),
    ),
    _RULES,
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (
        Labels("Qwen3"),
        *common(),
        *ACTIVATION,
        # 128, even if hidden_size / num_attention_heads differs
        *heads(groups=32, head_dim=128),
        # true would mean biases of q, k, v and o only, but linear_bias includes the feed-forward part
        Required("attention_bias", False, False),
        Constant("qk_norm", True),
        QWEN_WINDOWS,
        Rope(),
    ),
    _RULES,
    # Qwen3Config has no such field, and the model always has these norms; other programs write the field
    inert=("use_qk_norm",),
)
QWEN3_VL = in_tower(
    replace(
        QWEN3,
        entries=(
            *common(),
            *ACTIVATION,
            *heads(groups=32, head_dim=128),
            Required("attention_bias", False, False),
            Constant("qk_norm", True),
            # positions on three axes for images, which coincide for text
            Rope(default_base=500000.0, unread=("mrope_section", "mrope_interleaved"), needs_scaling=True),
        ),
    ),
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    Tower(
        "qwen3_vl_text",
        is_tied=False,
        is_tied_outside=False,
        defaults=default_sizes(layers=32, hidden=4096, feed_forward=22016, heads=32, vocabulary=151936),
        unread="image_token_id video_token_id vision_start_token_id vision_end_token_id",
        images=(r"model\.visual\..+",),
        trained=TrainedTower(
            ("qwen3_vl_vision", "qwen3_vl"),
            image_token=151655,
            rope_sections=(24, 20, 20),
            deepstack=(8, 16, 24),
        ),
    ),
)
_COEFFICIENT = "llama_4_scaling_beta"
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _COEFFICIENT: 0.1,
}
_ROPE = Rope()


@final
class _TemperedRope(Entry):
    """The rotary embedding, with the coefficient that scales queries by their position."""

    names = ROPE_NAMES

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        if all(config.get(kind) in (None, {}) for kind in ROPE_OBJECTS):
            config = {**config, "rope_parameters": _YARN}
        fields = _ROPE.read(rope_without(config, (_COEFFICIENT, "max_position_embeddings")))
        if fields["rope.scaling"] != "yarn":
            raise DataError(
                f"config.json: rope_type={fields['rope.scaling']} is not supported here, but yarn is needed"
            )
        objects = [config[kind] for kind in ROPE_OBJECTS if isinstance(config.get(kind), dict)]
        coefficients = {needed_value(parameters, _COEFFICIENT, float) for parameters in objects}
        if len(coefficients) > 1:
            both = " and ".join(ROPE_OBJECTS)
            raise DataError(f"config.json: {_COEFFICIENT} differs between {both}; remove the one that is wrong")
        return fields | {"rope.attention_temperature": coefficients.pop()}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        changes = _ROPE.write(config, model)
        coefficient = {_COEFFICIENT: model.rope.attention_temperature}
        return {
            name: value | coefficient if name in ROPE_OBJECTS and value else value for name, value in changes.items()
        }

    def older(self, config: dict[str, Any]) -> dict[str, Any]:
        return _ROPE.older(config)


MINISTRAL3 = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    (
        *common(norm_epsilon=1e-5),
        *ACTIVATION,
        *heads(groups=8, head_dim=128),
        Field("sliding_window", "sliding_window"),
        _TemperedRope(),
    ),
    _RULES,
)
assert MISTRAL3.tower is not None
MINISTRAL3_IMAGES = in_tower(
    MINISTRAL3,
    MISTRAL3.model_type,
    MISTRAL3.architecture,
    replace(
        MISTRAL3.tower,
        text_type="ministral3",
        other_types=("mistral",),
        # defaults of Ministral3Config
        defaults=default_sizes(layers=34, hidden=4096, feed_forward=14336, heads=32, vocabulary=131072),
    ),
)
_LISTED, _INTERVAL = "no_rope_layers", "no_rope_layer_interval"


def _rotates(config: dict[str, Any]) -> list[int]:
    """Returns a list with 1 for each layer with rotary positions, and 0 for the others."""
    num_layers, every = needed_value(config, "num_hidden_layers", int), needed_value(config, _INTERVAL, int, 4)
    listed = config.get(_LISTED)
    if listed is None and every > 0 and num_layers <= MAX_LISTED_LAYERS:
        return [int((layer + 1) % every != 0) for layer in range(num_layers)]
    # `type is not int`, because isinstance accepts true
    if (
        not isinstance(listed, list)
        or len(listed) != num_layers
        or any(type(value) is not int or value not in (0, 1) for value in listed)
    ):
        raise DataError(
            f"config.json: {_LISTED}={shown(listed)} must list 1, or 0 for no rotary positions, for each of "
            f"num_hidden_layers={counted(num_layers, 'layer')}, or {_INTERVAL}={every} must be above 0; correct the "
            "file"
        )
    return listed


@final
class _Unrotated(Entry):
    """Layers without rotary positions, from a list with a number per layer or from their distance."""

    names = (_LISTED, _INTERVAL)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        skipped = [1 - one for one in _rotates(config)]
        # n for every n-th layer, because people read model.*, or else the list
        every = skipped.index(1) + 1 if 1 in skipped else 0
        is_regular = (
            every and len(skipped) % every == 0 and skipped == ([0] * (every - 1) + [1]) * (len(skipped) // every)
        )
        return {"megatron.no_rope_freq": (every if is_regular else skipped) if every else None}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {_LISTED: [1 - one for one in skipped_rotations(model)]}

    def agrees(self, config: dict[str, Any], model: ModelSection) -> bool:
        return [1 - one for one in _rotates(config)] == skipped_rotations(model)


def _is_rotated(config: dict[str, Any]) -> IsWide:
    rotates = _rotates(config)
    return lambda layer: rotates[layer - 1] == 1


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    (
        *common(tied=True),
        *ACTIVATION,
        *heads(groups=4),
        LlamaBiases(),
        _Unrotated(),
        # without a list, layers without rotary positions have no window
        Windows(None, _is_rotated),
        Rope(2000000.0),
    ),
    _RULES,
)
# the whole tensor as a region, so that the rows of an adapter's B get the same order
_QKV = TensorPattern(f"{THEIRS}self_attn.qkv_proj.weight", "", region="(G s d) h", pieces=by_group("weight", " h"))
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    (
        *common(norm_epsilon=1e-5),
        *ACTIVATION,
        *heads(),
        Field("sliding_window", "sliding_window"),
        # dropout on the residual branches and on embeddings, which we do not have
        Required("resid_pdrop", 0.0, 0.0),
        Required("embd_pdrop", 0.0, 0.0),
        # transformers reads any other type as longrope, or refuses it
        Rope(is_scaled=False),
    ),
    (
        *VOCABULARY,
        *NORMS,
        Rule(f"{KEY}self_attention.linear_qkv.weight", "(G s d) h", (_QKV,)),
        in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "h (H d)"),
        in_layer("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", "(c f) h"),
        in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", "h f"),
    ),
)
FAMILIES = (LLAMA, MISTRAL, MISTRAL3, MINISTRAL3, MINISTRAL3_IMAGES, QWEN2, QWEN3, QWEN3_VL)
