"""Search for the family of a config.json or of a model."""

from __future__ import annotations

from typing import Any

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import UnsayableError
from mtrain.hf.schema.families.deepseek import DEEPSEEK_V3
from mtrain.hf.schema.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from mtrain.hf.schema.families.experts import MIXTRAL, QWEN3_MOE
from mtrain.hf.schema.families.gemma import GEMMA3
from mtrain.hf.schema.families.gpt_oss import GPT_OSS
from mtrain.hf.schema.families.olmo import OLMO2, OLMO3
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.known import refuse_fields_of_others, unknown_fields
from mtrain.hf.schema.values import shown

# In the order in which `fitting_family` tries them: the plain ones first.
FAMILIES = {
    family.model_type: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, GEMMA3, GPT_OSS, OLMO2, OLMO3)
}
_SHOWN_KEYS = 2
"""Largest number of keys that are shown for each family, where none fits."""
_ALL_NAMES = frozenset(name for family in FAMILIES.values() for name in family.names)


def family_of(config: dict[str, Any]) -> Family:
    """Returns the family that a config.json names.

    Raises:
        DataError: The file names no family, or an unknown one; or it has unread fields that could change the function
            of a model of this family.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise DataError(
            f"config.json: model_type={shown(name)} is not supported, but one of {', '.join(FAMILIES)} is needed"
        )
    own = FAMILIES[name].names
    # here and not in the entries: an entry sees only the fields that it knows
    refuse_fields_of_others(config, name, own, _ALL_NAMES - own)
    return FAMILIES[name]


def fields_nobody_knows(config: dict[str, Any]) -> list[str]:
    """Returns the fields of a config.json that are kept but not used, since their meaning is not known.

    Raises:
        DataError: The file names no family, or an unknown one, or has unread fields that could change the function.
    """
    return unknown_fields(config, family_of(config).names, _ALL_NAMES)


def fitting_family(model: ModelSection) -> Family:
    """Finds the first family whose config.json can describe the model, for weights that did not come from one.

    Raises:
        DataError: No family fits; names for each family what it cannot describe.
    """
    reasons = []
    for family in FAMILIES.values():
        try:
            # tried, not asked: writing and reading back shows differences
            family.config(model, None)
        except UnsayableError as fault:
            reasons.append(f"{family.model_type} lacks model.{', model.'.join(fault.keys[:_SHOWN_KEYS])}")
        except DataError:
            reasons.append(f"{family.model_type} knows no such sizes")
        else:
            return family
    raise DataError("no family of Hugging Face describes this model: " + "; ".join(reasons))
