"""Llama 3.x, Mistral, Qwen2.5 and Qwen3: one architecture in four dialects."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import Constant, Entry, Field, Required, Rope, heads
from mtrain.hf.schema.families.common import (
    ACTIVATION,
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    VOCABULARY,
    LayerWindows,
    common,
)
from mtrain.hf.schema.family import Family, in_tower
from mtrain.hf.schema.tower import Tower
from mtrain.hf.schema.values import needed_value, shown, value_of

_HEAD, _TOKENS = "ForSequenceClassification", "ForCausalLM"


@final
@dataclass(frozen=True)
class Labels(Entry):
    """`LlamaForSequenceClassification` and others: `score.weight` on the last token, one row per label."""

    prefix: str
    """Beginning of the class name in transformers."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("architectures", "num_labels", "id2label", "label2id")

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        if not _has_head(config):
            return {"num_labels": None}
        labels = config.get("id2label")
        if labels is not None and not isinstance(labels, dict):
            raise DataError(f"config.json: id2label={shown(labels)} must be an object of numbers and names; correct it")
        # transformers counts the names if any, and has two labels otherwise
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
    return isinstance(classes, list) and any(isinstance(each, str) and each.endswith(_HEAD) for each in classes)


_RULES = (*VOCABULARY, *NORMS, *ATTENTION, *FEED_FORWARD)


@final
@dataclass(frozen=True)
class LlamaBiases(Entry):
    """Llama's biases: in attention and the feed-forward part, both or neither."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("attention_bias", "mlp_bias")

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        attention, feed_forward = (needed_value(config, name, bool, False) for name in self.names)
        # megatron-core has one switch for both (add_bias_linear)
        if attention != feed_forward:
            raise DataError(
                f"config.json: attention_bias={attention} with mlp_bias={feed_forward} is not supported; both must "
                "be the same"
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
        # the default of MistralConfig where the file has none; other families have their own
        *heads(groups=8),
        # left out means 4096, as in transformers; null means no window
        Field("sliding_window", "sliding_window", 4096),
        Rope(),
    ),
    _RULES,
)
MISTRAL3 = in_tower(
    # without heads of sequences
    replace(MISTRAL, entries=MISTRAL.entries[1:]),
    "mistral3",
    "Mistral3ForConditionalGeneration",
    Tower(
        "mistral",
        is_tied=False,
        # of MistralConfig
        defaults={
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "vocab_size": 32000,
        },
        unread=(
            "image_token_index",
            "image_token_id",
            "multimodal_projector_bias",
            "projector_hidden_act",
            "spatial_merge_size",
            "vision_feature_layer",
        ),
        other_types=("ministral3",),
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
        # not a field of the file: Qwen2Attention has fixed biases
        Constant("qkv_bias", True),
        LayerWindows(),
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
        # 128 whatever hidden_size / num_attention_heads is
        *heads(groups=32, head_dim=128),
        # true would mean biases of q, k, v and o only: linear_bias includes the feed-forward part
        Required("attention_bias", False, False),
        Constant("qk_norm", True),
        LayerWindows(),
        Rope(),
    ),
    _RULES,
    # a switch of other programs: Qwen3Config has no such field, and the norms are always there
    inert=("use_qk_norm",),
)
