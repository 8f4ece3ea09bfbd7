"""Finds the family of a config.json, a model or a run.

config.json alone determines what a folder's weights compute. If transformers reads a field that we ignore, the same
weights compute two functions, so every field is one of these:

- read by the family's entries (`Entry.names`);
- INERT, without effect on what the weights compute;
- read by another family's entries, or in CHANGES_THE_FUNCTION: refused unless it is switched off (`_is_off`);
- anything else, which has an unknown meaning and is reported to the user (`unknown_fields`).
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import InexpressibleError
from mtrain.hf.schema.families import deepseek, dense, experts, gemma, hybrid, nemotron, olmo
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.files import CONFIG_NAME, read_json
from mtrain.hf.schema.inert import INERT
from mtrain.hf.schema.rope import ROPE_NAMES
from mtrain.hf.schema.values import shown

# in the order in which `fitting_family` tries them, plain ones first
_FAMILIES = (
    *dense.FAMILIES,
    *experts.FAMILIES,
    *hybrid.FAMILIES,
    *deepseek.FAMILIES,
    *gemma.FAMILIES,
    experts.GPT_OSS,
    *olmo.FAMILIES,
    experts.MINIMAX_M2,
    deepseek.GLM4_MOE,
    dense.SMOLLM3,
    dense.PHI3,
    nemotron.NEMOTRON_H,
)
FAMILIES: dict[str, Family] = {}
"""model_type -> family; a slash and the text model's type follow for a second text model with images."""
for _family in _FAMILIES:
    if _family.tower is not None and _family.model_type in FAMILIES:
        FAMILIES[f"{_family.model_type}/{_family.tower.text_type}"] = _family
    else:
        FAMILIES[_family.model_type] = _family
_SHOWN_KEYS = 2
"""Limit on keys per family in a message that no family fits."""
_ENTRIES = tuple(entry for family in FAMILIES.values() for entry in family.entries)
# without inert fields, which are harmless in all families
_ALL_NAMES = frozenset(name for entry in _ENTRIES for name in entry.names)


def family_of(config: dict[str, Any]) -> Family:
    """Returns the family that a config.json names."""
    name = config.get("model_type")
    known = dict.fromkeys(member.model_type for member in FAMILIES.values())
    if not isinstance(name, str) or name not in known:
        raise DataError(
            f"config.json: model_type={shown(name)} is not supported, but one of {', '.join(known)} is needed"
        )
    family = FAMILIES[name]
    if family.tower is not None:
        family = FAMILIES.get(f"{name}/{family.tower.type_of(config)}", family)
    for _, part, names in family.parts(config):
        # here, because an entry sees only the fields that it knows
        _refuse_fields_of_others(part, name, names)
    return family


def unknown_fields(config: dict[str, Any]) -> list[str]:
    """Returns the fields of unknown meaning, which exports keep."""
    unknown = []
    for prefix, part, names in family_of(config).parts(config):
        known = INERT | CHANGES_THE_FUNCTION | names | _ALL_NAMES | {"is_causal"}
        unknown += [prefix + name for name in sorted(part.keys() - known) if not _is_neutral(part[name])]
    return unknown


def fitting_family(model: ModelSection) -> Family:
    """Returns the first family whose config.json can describe the model, for weights that have no config.json."""
    reasons = []
    # a model that was randomly initialized has no image tensors
    for family in (candidate for candidate in FAMILIES.values() if candidate.tower is None):
        try:
            # tries it, because writing and reading back shows all differences
            family.config(model, None)
        except InexpressibleError as fault:
            reasons.append(f"{family.model_type} lacks model.{', model.'.join(fault.keys[:_SHOWN_KEYS])}")
        except DataError:
            reasons.append(f"{family.model_type} does not support these sizes")
        else:
            return family
    raise DataError("no Hugging Face family can describe this model: " + "; ".join(reasons))


_ELSEWHERE = """add_cross_attention alibi attention_chunk_size attention_multiplier attn_logit_softcapping clip_qkv
cross_attention_hidden_size embedding_multiplier final_logit_softcapping is_decoder is_encoder_decoder layer_norm_eps
logit_scale logits_scaling mrope_section norm_type num_kv_shared_layers
parallel_attn per_layer_config pruned_heads qk_layernorm qk_norm qkv_bias residual_multiplier rope_ratio rotary_pct
tie_encoder_decoder use_alibi use_mrope use_parallel_residual use_qk_norm use_qkv_bias"""
CHANGES_THE_FUNCTION = frozenset(_ELSEWHERE.split())
"""Fields that transformers reads in some model, but none of our families does."""

_SHOWN_FIELDS = 4
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "")
READ_BY_ALL = frozenset((*ROPE_NAMES, "attention_chunk_size", "layer_types", "mlp_layer_types", "per_layer_config"))
"""Fields that transformers reads or refuses in every family, so that 0 does not switch them off."""
_FACTORS = dict.fromkeys(
    ("embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier", "rope_ratio", "rotary_pct"), 1
)
"""Fields of CHANGES_THE_FUNCTION -> neutral value."""


def _off_values() -> dict[str, list[Any]]:
    """Returns field -> values, besides empty ones, that have no effect in a family that does not read the field."""
    values: dict[str, list[Any]] = {name: [0] for name in (_ALL_NAMES | CHANGES_THE_FUNCTION) - READ_BY_ALL}
    for name, value in [*_FACTORS.items(), *(pair for entry in _ENTRIES for pair in entry.off.items())]:
        values.setdefault(name, []).append(value)
    return values


def _parts() -> dict[str, str]:
    """Returns field -> part of a model, for fields that have no meaning without that part in any family."""
    parts_of: dict[str, set[str | None]] = {}
    for family in FAMILIES.values():
        pairs = {(name, entry.part) for entry in family.entries for name in entry.names}
        named = {name for name, part in pairs if part is not None}
        for name, part in pairs:
            if part is not None or name not in named:
                parts_of.setdefault(name, set()).add(part)
    return {name: part for name, parts in parts_of.items() if len(parts) == 1 for part in parts if part is not None}


_OFF, _PART = _off_values(), _parts()
_SIZES = [pair for entry in _ENTRIES for pair in entry.sizes()]
"""(part of a model, field with its size)."""


def _is_off(name: str, config: Mapping[str, Any], known: Collection[str]) -> bool:
    """Returns whether a field has no effect: it is empty, has its family's neutral value, belongs to a part of size 0,
    or is a window that is switched off."""
    value = config[name]
    is_bool = isinstance(value, bool)
    if _is_neutral(value) or any(
        value == neutral and is_bool == isinstance(neutral, bool) for neutral in _OFF.get(name, ())
    ):
        return True
    if name == "sliding_window" and config.get("use_sliding_window") is False:
        return True
    sizes = [field for part, field in _SIZES if part == _PART.get(name)]
    return (
        bool(sizes)
        and name not in sizes
        and all(_is_off(size, config, known) if size in config else size not in known for size in sizes)
    )


def _refuse_fields_of_others(config: Mapping[str, Any], model_type: str, known: Collection[str]) -> None:
    """Refuses fields not in `known` that could change the function."""
    # separately, because false, which is not neutral here, would pass below
    if config.get("is_causal", True) is not True:
        raise DataError("config.json: is_causal must be true, because attention to later tokens is not supported")
    foreign = (CHANGES_THE_FUNCTION | _ALL_NAMES) - frozenset(known) - INERT
    refused = [name for name in config if name in foreign and not _is_off(name, config, known)]
    if refused:
        listing = ", ".join(f"{name}={shown(config[name])}" for name in refused[:_SHOWN_FIELDS])
        raise DataError(
            f"config.json: {listing} is not supported in a {model_type} model; remove it if it does not affect what "
            "the weights compute"
        )


def _is_neutral(value: object) -> bool:
    # compares types as well, because 0 == False
    return any(value is neutral or (value == neutral and type(value) is type(neutral)) for neutral in _NEUTRAL)


ORIGIN = "hf"
"""Folder in an imported checkpoint with the files that came with the weights: config.json, index, tokenizer."""
SHARDS_NAME = "shards.json"
"""File in that folder with the metadata and tensor names of each weights file."""


def refuse_unexportable(config: Config) -> None:
    """Refuses, with a ConfigError, a run that asks for exports of a model that no config.json can describe.

    Exports weights from a Hugging Face folder or its import as that folder's family, and others as the first family
    that fits. (For weights of another run, the export finds the family.)
    """
    if config.checkpoint.export_hf_every_steps == 0:
        return
    try:
        template, family = _template(config), family_of_run(config)
        # the same call as in an export, so both refuse the same models
        family.config(config.model, template)
    except DataError as fault:
        raise ConfigError(
            f"checkpoint.export_hf_every_steps={config.checkpoint.export_hf_every_steps} asks for Hugging Face "
            f"folders, but {fault}; change the model, or set it to 0"
        ) from None


def family_of_run(config: Config) -> Family:
    """Returns the family of the folder or import with a run's weights, or else the first one that fits the model."""
    template = _template(config)
    return fitting_family(config.model) if template is None else family_of(template)


def _template(config: Config) -> dict[str, Any] | None:
    return template_at(config.model.hf, config.checkpoint.initialize_from)


def template_at(hf: str | None, start: str | None) -> dict[str, Any] | None:
    """Returns the config.json that came with a run's weights; None without one."""
    folders = [Path(hf)] if hf is not None else []
    folders += [Path(start) / ORIGIN] if start is not None else []
    return next((read_json(folder / CONFIG_NAME) for folder in folders if (folder / CONFIG_NAME).is_file()), None)
