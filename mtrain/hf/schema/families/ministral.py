"""Ministral 3, with or without images: Mistral with yarn, and queries that grow with position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import Entry, Field, Rope, heads
from mtrain.hf.schema.families.common import ACTIVATION, ATTENTION, FEED_FORWARD, NORMS, VOCABULARY, common
from mtrain.hf.schema.families.dense import MISTRAL3
from mtrain.hf.schema.family import Family, in_tower
from mtrain.hf.schema.rope import ROPE_NAMES
from mtrain.hf.schema.values import needed_value

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
_ROPE = Rope()  # parameters without a base; a file without parameters has that of _YARN
_KINDS = ("rope_parameters", "rope_scaling")


@final
@dataclass(frozen=True)
class _TemperedRope(Entry):
    """The rotary embedding, with the coefficient by which queries grow."""

    @property
    def names(self) -> tuple[str, ...]:
        return ROPE_NAMES

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        if all(config.get(kind) in (None, {}) for kind in _KINDS):
            config = {**config, "rope_parameters": _YARN}
        found = _ROPE.read(_rotary_alone(config))
        if found["rope.scaling"] != "yarn":
            raise DataError(f"config.json: rope_type={found['rope.scaling']} is not supported here, but yarn is needed")
        coefficients = {
            needed_value(config[kind], _COEFFICIENT, float) for kind in _KINDS if isinstance(config.get(kind), dict)
        }
        if len(coefficients) > 1:
            raise DataError(
                f"config.json: {_COEFFICIENT} differs between {' and '.join(_KINDS)}; remove the one that is wrong"
            )
        return found | {"rope.attention_temperature": coefficients.pop()}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        changes = _ROPE.write(config, model)
        own = {_COEFFICIENT: model.rope.attention_temperature}
        return {name: value | own if name in _KINDS and value else value for name, value in changes.items()}

    def older(self, config: dict[str, Any]) -> dict[str, Any]:
        return _ROPE.older(config)


def _rotary_alone(config: Mapping[str, Any]) -> dict[str, Any]:
    others = {_COEFFICIENT, "max_position_embeddings"}
    given = {kind: config[kind] for kind in _KINDS if isinstance(config.get(kind), dict)}
    return {**config} | {
        kind: {name: value for name, value in parameters.items() if name not in others}
        for kind, parameters in given.items()
    }


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
    (*VOCABULARY, *NORMS, *ATTENTION, *FEED_FORWARD),
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
        # of Ministral3Config
        defaults={
            "num_hidden_layers": 34,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "vocab_size": 131072,
        },
    ),
)
