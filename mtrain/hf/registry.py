"""Finds the family of a config.json or of a model."""

from __future__ import annotations

from typing import Any

from mtrain.config.model import ModelSection
from mtrain.errors import DataError
from mtrain.hf.families.deepseek import DEEPSEEK_V3
from mtrain.hf.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from mtrain.hf.families.experts import MIXTRAL, QWEN3_MOE
from mtrain.hf.families.gemma import GEMMA3
from mtrain.hf.families.gpt_oss import GPT_OSS
from mtrain.hf.family import Family

FAMILIES = {
    family.model_type: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, GEMMA3, GPT_OSS)
}


def family_of(config: dict[str, Any]) -> Family:
    """The family that a config.json names.

    Raises:
        DataError: It names none, or one that is not known.
    """
    name = config.get("model_type")
    if name not in FAMILIES:
        raise DataError(
            f"config.json: model_type={name!r} is not supported, but one of {', '.join(FAMILIES)} is needed"
        )
    return FAMILIES[name]


def fitting_family(model: ModelSection) -> Family:
    """The first family whose config.json can describe the model, for weights that did not come from one.

    Raises:
        DataError: There is none.
    """
    reasons = []
    for family in FAMILIES.values():
        try:
            family.config(model, None)
        except DataError as fault:
            reasons.append(str(fault))
        else:
            return family
    raise DataError("no family of Hugging Face describes this model: " + "; ".join(reasons))
