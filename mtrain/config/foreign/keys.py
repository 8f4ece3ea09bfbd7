"""Keys of other programs that people type here, with ours.

Sources: the arguments of Megatron-LM; TrainingArguments of transformers, SFTConfig of TRL, LoraConfig of PEFT and the
config.json of models; the configurations of torchtitan, axolotl, ms-swift, verl and NeMo.
"""

from mtrain.config.foreign.megatron_arguments import DELTA_NET, EXPERTS, LATENT_ATTENTION, SWITCHES, VALUES
from mtrain.config.megatron_fields import TYPED_KNOBS, by_name

_MEGATRON_LM = SWITCHES | {
    name: key for table in (VALUES, LATENT_ATTENTION, DELTA_NET, EXPERTS) for name, (key, _) in table.items()
}
OURS = {
    **TYPED_KNOBS,
    **{name.replace("-", "_"): key for name, key in _MEGATRON_LM.items()},
    **by_name(
        {
            "layout": "parallelism parallel parallel_config",
            "layout.tp": "tensor_parallel_size tensor_parallel tensor_parallel_degree tp_size",
            "layout.pp": "pipeline_parallel_size pipeline_parallel pipeline_parallel_degree pp_size",
            "layout.vpp": "virtual_pipeline_parallel_size",
            "layout.cp": "context_parallel context_parallel_degree cp_size ulysses_sequence_parallel_size "
            "sequence_parallel_degree",
            "layout.ep": "expert_parallel_size expert_parallel expert_parallel_degree ep_size",
            "layout.etp": "expert_tensor_parallel_degree etp_size",
            "train": "trainer training training_args training_arguments",
            "train.num_steps": "max_steps total_steps max_iters total_training_steps train_steps training_steps",
            "train.num_epochs": "num_train_epochs epochs max_epochs total_epochs n_epochs",
            "train.global_batch_size": "total_batch_size",
            "train.global_batch_size or train.micro_batch_size": "batch_size train_batch_size",
            "train.micro_batch_size": "per_device_train_batch_size micro_batch_size_per_gpu local_batch_size "
            "ppo_micro_batch_size_per_gpu train_micro_batch_size_per_gpu",
            "train.tokens_per_micro_batch": "max_token_len_per_gpu ppo_max_token_len_per_gpu",
            "train.precision": "dtype torch_dtype mixed_precision mixed_precision_param",
            "train.recompute": "gradient_checkpointing activation_checkpointing activation_checkpoint "
            "enable_gradient_checkpointing use_gradient_checkpointing activations_checkpoint_granularity",
            "train.offload_optimizer": "optimizer_offload",
            "train.compile": "torch_compile",
            "optimizer": "optim optimizer_config",
            "optimizer.lr": "learning_rate max_lr",
            "optimizer.schedule": "lr_scheduler lr_scheduler_type lr_decay_style scheduler sched",
            "optimizer.warmup_steps": "lr_warmup_steps num_warmup_steps",
            "optimizer.warmup_ratio": "lr_warmup_fraction lr_warmup_steps_ratio warmup_steps_ratio warmup_fraction",
            "optimizer.decay_steps": "lr_decay_steps",
            "optimizer.clip_grad": "max_grad_norm gradient_clipping grad_clip gradient_clip_val max_norm",
            "optimizer.epsilon": "adam_epsilon eps",
            "data": "dataset_config data_config",
            "data.seq_length": "sequence_len max_length max_seq_length max_seq_len sequence_length cutoff_len seq_len",
            "data.packing": "sample_packing pack_sequences use_dynamic_bsz packed_sequence",
            "data.seed": "data_seed",
            "data.train": "train_files train_file data_path dataset datasets train_dataset train_data",
            "data.valid": "val_files eval_dataset test_datasets val_dataset validation_dataset",
            "data.split": "val_set_size split_dataset_ratio",
            "data.too_long": "truncation truncation_strategy excess_length_strategy",
            "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_name_or_path",
            "data.chat_template": "chat_template_jinja chat_template_path",
            "model.hf": "base_model model_name_or_path pretrained_model_name_or_path model_path hf_assets_path "
            "partial_pretrain",
            "model.add_tokens": "new_tokens additional_tokens",
            "model.backend": "attention_backend attn_implementation flash_attention use_flash_attn transformer_impl",
            "model.num_layers": "num_hidden_layers n_layers n_layer",
            "model.hidden_size": "n_embd d_model",
            "model.ffn_hidden_size": "intermediate_size",
            "model.num_attention_heads": "n_heads n_head",
            "model.num_query_groups": "num_key_value_heads num_kv_heads n_kv_heads",
            "model.norm_epsilon": "rms_norm_eps layer_norm_eps layer_norm_epsilon",
            "model.rope.base": "rope_theta rotary_base rotary_emb_base",
            "model.tied_embeddings": "tie_word_embeddings share_embeddings_and_output_weights",
            "model.activation": "hidden_act activation_function",
            "model.init_std": "initializer_range",
            "model.experts.num_experts": "num_local_experts n_routed_experts",
            "model.experts.top_k": "num_experts_per_tok num_experts_per_token",
            "model.experts.ffn_hidden_size": "moe_intermediate_size moe_ffn_hidden_size",
            "adapter": "lora peft peft_config lora_config",
            "adapter.rank": "lora_r lora_rank adapter_dim",
            "adapter.alpha": "lora_alpha",
            "adapter.dropout": "lora_dropout",
            "adapter.scaling": "use_rslora peft_use_rslora",
            "adapter.modules_to_save": "lora_modules_to_save",
            "adapter.targets": "lora_target_modules target_modules lora_target_linear",
            "run.dir": "output_dir save_dir default_local_dir dump_folder",
            "run.name": "run_name experiment_name wandb_name",
            "checkpoint": "checkpointing checkpoints ckpt",
            "checkpoint.interval_steps": "save_steps save_interval save_freq",
            "checkpoint.keep_last": "save_total_limit max_ckpt_to_keep keep_latest_k",
            "checkpoint.async_save": "async_mode",
            "checkpoint.initialize_from": "load pretrained_checkpoint initial_load_path",
            "checkpoint.resume": "resume_from_checkpoint resume_mode auto_resume resume_if_exists",
            "valid": "validation evaluation",
            "valid.interval_steps": "eval_steps eval_interval test_freq val_check_interval",
            "metrics": "logging",
            "metrics.console_interval_steps": "logging_steps log_freq log_every_n_steps",
            "metrics.trackers": "report_to logger wandb enable_wandb use_wandb",
            "metrics.tensorboard": "enable_tensorboard use_tensorboard",
            "metrics.project": "wandb_project project_name",
        }
    ),
}
"""Name in another program -> our equivalent, in whichever section it is typed."""
SYNONYMS = {
    key: frozenset(names.split())
    for key, names in {
        "interval_steps": "every_steps every interval freq frequency every_n_steps interval_in_steps",
        "num_steps": "steps iters iterations",
        "num_epochs": "epoch",
        "num_attention_heads": "num_heads heads",
        "keep_last": "keep max_to_keep max_keep",
        "lr": "rate",
        "hf": "name path name_or_path pretrained",
        "kind": "name type",
        "rank": "r",
        "base_dtype": "dtype",
        "schedule": "decay_type",
        "dir": "folder directory path",
        "max_new_tokens": "max_tokens max_completion_length",
        "columns": "column_mapping rename_columns field_mapping",
    }.items()
}
"""Our key -> its synonyms in sections that have it."""
_BATCH = "train.global_batch_size, train.micro_batch_size and the number of data-parallel ranks"
_RANKS = "the number of ranks that are started and the other degrees of layout"
FOLLOWING = by_name(
    {
        _BATCH: "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps gradient_accumulation",
        _RANKS: "dp dp_size data_parallel_size data_parallel_degree data_parallel_replicate_degree "
        "data_parallel_shard_degree dp_shard_size dp_replicate_size",
        "the way in which the ranks are started, such as `mtrain launch`": "num_nodes nnodes n_gpus_per_node "
        "nproc_per_node devices gpus world_size num_gpus",
    }
)
"""Name in another program without an equivalent -> what its value follows from here."""
