"""Fields of config.json that do not change what the weights compute, in any family."""

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
"""Fields that do not change what the weights compute: origin, formats, special tokens, outputs, sampling, training
losses. (The code that reads weights checks their formats.)"""
