"""Finds the family of a config.json, a model or a run.

A folder's config.json alone says what its weights compute. If transformers reads a field that this program does not,
the same bytes become two functions, so every field is one of these:

- read by the family's entries (`Entry.names`);
- INERT: it does not affect what the weights compute;
- read by another family's entries or in CHANGES_THE_FUNCTION: refused unless it is switched off (`_is_off`);
- anything else: reported to the user (`fields_nobody_knows`), because its meaning is unknown.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import UnsayableError
from mtrain.hf.schema.families import deepseek, dense, experts, gemma, hybrid, nemotron, olmo
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.files import CONFIG_NAME, read_json
from mtrain.hf.schema.rope import ROPE_NAMES
from mtrain.hf.schema.values import shown

# In the order in which `fitting_family` tries them: the plain ones first.
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
"""Name in config.json -> family; a second kind of text model with images follows a slash."""
for _family in _FAMILIES:
    if _family.tower is not None and _family.model_type in FAMILIES:
        FAMILIES[f"{_family.model_type}/{_family.tower.text_type}"] = _family
    else:
        FAMILIES[_family.model_type] = _family
_SHOWN_KEYS = 2
"""Most keys in a message for each family, if none fits."""
_ENTRIES = tuple(entry for family in FAMILIES.values() for entry in family.entries)
# without fields that a family leaves unread: harmless in their own family, they are harmless in others
_ALL_NAMES = frozenset(name for entry in _ENTRIES for name in entry.names)


def family_of(config: dict[str, Any]) -> Family:
    """Returns the family that a config.json names."""
    name = config.get("model_type")
    known = dict.fromkeys(each.model_type for each in FAMILIES.values())
    if not isinstance(name, str) or name not in known:
        raise DataError(
            f"config.json: model_type={shown(name)} is not supported, but one of {', '.join(known)} is needed"
        )
    family = FAMILIES[name]
    if family.tower is not None:
        family = FAMILIES.get(f"{name}/{family.tower.type_of(config)}", family)
    for _, part, own in family.parts(config):
        # here and not in the entries: an entry sees only the fields that it knows
        _refuse_fields_of_others(part, name, own)
    return family


def fields_nobody_knows(config: dict[str, Any]) -> list[str]:
    """Returns the fields of unknown meaning, which are kept but not used."""
    found = []
    for before, part, own in family_of(config).parts(config):
        known = INERT | CHANGES_THE_FUNCTION | own | _ALL_NAMES | {"is_causal"}
        found += [before + name for name in sorted(part.keys() - known) if not _is_neutral(part[name])]
    return found


def fitting_family(model: ModelSection) -> Family:
    """Finds the first family whose config.json can describe the model, for weights without one."""
    reasons = []
    # a model that began at random has no image tensors
    for family in (each for each in FAMILIES.values() if each.tower is None):
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


_DESCRIPTION = """architectures model_type transformers_version _name_or_path name_or_path _model_name_or_path
_commit_hash torch_dtype dtype auto_map tokenizer_class model_max_length unsloth_version unsloth_fixed
max_position_embeddings initial_context_length quantization_config pretraining_tp transformers_weights"""
_TOKENS = "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id"
_OUTPUTS = """use_cache output_attentions output_hidden_states output_router_logits output_scores return_dict
return_dict_in_generate attn_implementation _attn_implementation _attn_implementation_autoset cache_implementation
experts_implementation torchscript use_bfloat16 chunk_size_feed_forward id2label label2id num_labels problem_type prefix
finetuning_task task_specific_params"""
_GENERATION = """assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff
eta_cutoff exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences
remove_invalid_values repetition_penalty suppress_tokens target_lookbehind temperature top_k top_p typical_p"""
_TRAINING = "router_aux_loss_coef aux_loss_alpha seq_aux ep_size"
INERT = frozenset(" ".join([_DESCRIPTION, _TOKENS, _OUTPUTS, _GENERATION, _TRAINING]).split())
"""Fields that do not change what the weights compute: origin, formats, special tokens, reports, sampling, training
losses. (Weight formats are judged where they are read.)"""

_ELSEWHERE = """add_cross_attention alibi attention_chunk_size attention_multiplier attn_logit_softcapping clip_qkv
cross_attention_hidden_size embedding_multiplier final_logit_softcapping is_decoder is_encoder_decoder layer_norm_eps
logit_scale logits_scaling mrope_section norm_type num_kv_shared_layers
parallel_attn per_layer_config pruned_heads qk_layernorm qk_norm qkv_bias residual_multiplier rope_ratio rotary_pct
tie_encoder_decoder use_alibi use_mrope use_parallel_residual use_qk_norm use_qkv_bias"""
CHANGES_THE_FUNCTION = frozenset(_ELSEWHERE.split())
"""Fields that models of transformers read, but none of our families."""

_SHOWN_FIELDS = 4
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "")
READ_BY_ALL = frozenset((*ROPE_NAMES, "attention_chunk_size", "layer_types", "mlp_layer_types", "per_layer_config"))
"""Fields that transformers reads or refuses in every family: 0 does not mean absence."""
_FACTORS = dict.fromkeys(
    ("embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier", "rope_ratio", "rotary_pct"), 1
)
"""Fields of CHANGES_THE_FUNCTION -> neutral value."""


def _off_values() -> dict[str, list[Any]]:
    """Returns field -> values, besides empty ones, that switch nothing on if a family does not read it."""
    found: dict[str, list[Any]] = {name: [0] for name in (_ALL_NAMES | CHANGES_THE_FUNCTION) - READ_BY_ALL}
    for name, value in [*_FACTORS.items(), *(pair for entry in _ENTRIES for pair in entry.off.items())]:
        found.setdefault(name, []).append(value)
    return found


def _parts() -> dict[str, str]:
    """Returns field -> part of a model, for fields that mean nothing without that part in any family."""
    found: dict[str, set[str | None]] = {}
    for family in FAMILIES.values():
        of_family = {(name, entry.part) for entry in family.entries for name in entry.names}
        named = {name for name, part in of_family if part is not None}
        for name, part in of_family:
            if part is not None or name not in named:
                found.setdefault(name, set()).add(part)
    return {name: part for name, parts in found.items() if len(parts) == 1 for part in parts if part is not None}


_OFF, _PART = _off_values(), _parts()
_SIZES = [each for entry in _ENTRIES for each in entry.sizes()]
"""Parts of a model, each with a field that gives its size."""


def _is_off(name: str, config: Mapping[str, Any], own: Collection[str]) -> bool:
    """Says whether an unread field is empty, off for the family that owns it, of a part without a size, or a disabled
    window."""
    value = config[name]
    is_bool = isinstance(value, bool)
    if _is_neutral(value) or any(value == one and is_bool == isinstance(one, bool) for one in _OFF.get(name, ())):
        return True
    if name == "sliding_window" and config.get("use_sliding_window") is False:
        return True
    sizes = [each for part, each in _SIZES if part == _PART.get(name)]
    return (
        bool(sizes)
        and name not in sizes
        and all(_is_off(size, config, own) if size in config else size not in own for size in sizes)
    )


def _refuse_fields_of_others(config: Mapping[str, Any], model_type: str, own: Collection[str]) -> None:
    """Refuses fields outside of `own`, which the family reads or is known to ignore, that could change the function."""
    # separately: here the neutral value is true, so false would pass below
    if config.get("is_causal", True) is not True:
        raise DataError("config.json: is_causal must be true: attention that sees later tokens is not supported")
    of_another = (CHANGES_THE_FUNCTION | _ALL_NAMES) - frozenset(own) - INERT
    found = [name for name in config if name in of_another and not _is_off(name, config, own)]
    if found:
        listing = ", ".join(f"{name}={shown(config[name])}" for name in found[:_SHOWN_FIELDS])
        raise DataError(
            f"config.json: {listing}: a {model_type} model does not have that here; remove it if it does not affect "
            "what the weights compute"
        )


def _is_neutral(value: object) -> bool:
    # the type as well: 0 == False, but 0 is a value
    return any(value is one or (value == one and type(value) is type(one)) for one in _NEUTRAL)


ORIGIN = "hf"
"""Folder in an imported checkpoint with the files that came with the weights: config.json, index, tokenizer."""
SHARDS_NAME = "shards.json"
"""File in that folder with the tensor names of each weights file, and its metadata."""


def refuse_unexportable(config: Config) -> None:
    """Refuses with a ConfigError a run that should export a model that no config.json can describe.

    Weights from a Hugging Face folder, or its import, are exported as its family; others as the first family that fits.
    (For weights of another run, the export finds the family.)
    """
    if config.checkpoint.export_hf_every_steps == 0:
        return
    try:
        # before any rank starts: otherwise a run would train for hours up to its first export
        template, family = _template(config), family_of_run(config)
        # the same call as in the export, so both refuse the same models
        family.config(config.model, template)
    except DataError as fault:
        raise ConfigError(
            f"checkpoint.export_hf_every_steps={config.checkpoint.export_hf_every_steps} asks for folders of Hugging "
            f"Face, but {fault}; change the model, or set it to 0"
        ) from None


def family_of_run(config: Config) -> Family:
    """Finds the family of a run's model: that of the folder or import with its weights, else one that fits."""
    template = _template(config)
    return fitting_family(config.model) if template is None else family_of(template)


def _template(config: Config) -> dict[str, Any] | None:
    return template_at(config.model.hf, config.checkpoint.initialize_from)


def template_at(hf: str | None, start: str | None) -> dict[str, Any] | None:
    """Returns the config.json that came with a run's weights, if any."""
    places = [Path(hf)] if hf is not None else []
    places += [Path(start) / ORIGIN] if start is not None else []
    return next((read_json(place / CONFIG_NAME) for place in places if (place / CONFIG_NAME).is_file()), None)
