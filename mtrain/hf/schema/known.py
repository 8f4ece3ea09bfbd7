"""Fields of config.json that no table of a family reads: without effect, refused, or unknown.

A folder's config.json alone says what its weights compute. A field that transformers reads and this program does not
would make two functions of the same bytes, so every field is one of these:

- read by the family's entries (`Entry.names`);
- INERT: it changes nothing of what the weights compute;
- read by another family's entries or in CHANGES_THE_FUNCTION: refused unless it is null, false or empty;
- anything else: named to the user (`unknown_fields`), since nobody can say what it means.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mtrain.base.errors import DataError
from mtrain.hf.schema.values import shown

_DESCRIPTION = """architectures model_type transformers_version _name_or_path name_or_path _commit_hash torch_dtype
dtype auto_map tokenizer_class model_max_length unsloth_version unsloth_fixed max_position_embeddings
initial_context_length quantization_config pretraining_tp transformers_weights"""
_TOKENS = "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id"
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
"""Fields that do not change what the weights compute: origin, formats, special tokens, reports, sampling, losses of
training. (Weights in other formats are judged where they are read.)"""

_ELSEWHERE = """add_cross_attention alibi attention_chunk_size attention_multiplier attn_logit_softcapping clip_qkv
cross_attention_hidden_size embedding_multiplier final_logit_softcapping is_decoder is_encoder_decoder layer_norm_eps
logit_scale logits_scaling mrope_section no_rope_layer_interval no_rope_layers norm_type num_kv_shared_layers
parallel_attn per_layer_config pruned_heads qk_layernorm qk_norm qkv_bias residual_multiplier rope_ratio rotary_pct
tie_encoder_decoder use_alibi use_mrope use_parallel_residual use_qk_norm use_qkv_bias"""
CHANGES_THE_FUNCTION = frozenset(_ELSEWHERE.split())
"""Fields that models of transformers read, but none of our families."""

_SHOWN_FIELDS = 4
"""Largest number of refused fields that are shown."""
# These switch a feature off. 0 and 0.0 are not among them: a factor of 0 is a value.
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "")


def refuse_fields_of_others(
    config: Mapping[str, Any], model_type: str, own: Collection[str], of_others: Collection[str]
) -> None:
    """Refuses fields that could change the function and are not read.

    Args:
        config: Content of the file.
        model_type: Name of the family, for the message.
        own: Fields that the family reads, or is known to leave unread.
        of_others: Fields that other families read.

    Raises:
        DataError: A field could change the function; names it.
    """
    # separately: here the neutral value is true, so false would pass below
    if config.get("is_causal", True) is not True:
        raise DataError("config.json: is_causal must be true: attention that sees later tokens is not supported")
    of_another = (CHANGES_THE_FUNCTION | frozenset(of_others)) - frozenset(own) - INERT
    found = [name for name in config if name in of_another and not _is_neutral(config[name])]
    if found:
        listing = ", ".join(f"{name}={shown(config[name])}" for name in found[:_SHOWN_FIELDS])
        raise DataError(
            f"config.json: {listing}: a {model_type} model does not have that here; remove it if it changes nothing of "
            "what the weights compute"
        )


def unknown_fields(config: Mapping[str, Any], own: Collection[str], of_others: Collection[str]) -> list[str]:
    """Returns the fields whose meaning is not known, sorted."""
    known = INERT | CHANGES_THE_FUNCTION | frozenset(own) | frozenset(of_others) | {"is_causal"}
    return sorted(name for name in config if name not in known and not _is_neutral(config[name]))


def _is_neutral(value: object) -> bool:
    # the type as well: 0 == False, but 0 is a value
    return any(value is one or (value == one and type(value) is type(one)) for one in _NEUTRAL)
