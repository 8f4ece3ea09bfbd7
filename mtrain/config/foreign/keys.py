"""Keys of other programs that people type here, with ours."""

from mtrain.config.megatron_fields import TYPED_KNOBS

OURS = {
    **TYPED_KNOBS,
    **{
        name: key
        for key, names in {
            "layout.tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel tp_size",
            "layout.pp": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel pp_size",
            "layout.vpp": "virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank",
            "layout.cp": "context_parallel_size context_parallel cp_size ulysses_sequence_parallel_size",
            "layout.cp_comm": "cp_comm_type",
            "layout.ep": "expert_model_parallel_size expert_parallel_size ep_size",
            "layout.etp": "expert_tensor_parallel_size",
            "layout.sp": "sequence_parallel",
            "train.num_steps": "max_steps train_iters total_steps max_iters total_training_steps train_steps",
            "train.num_epochs": "num_train_epochs epochs max_epochs total_epochs",
            "train.global_batch_size": "train_batch_size batch_size gradient_accumulation_steps",
            "train.micro_batch_size": "per_device_train_batch_size micro_batch_size_per_gpu",
            "train.precision": "bf16 fp16 dtype torch_dtype mixed_precision",
            "train.recompute": "gradient_checkpointing activation_checkpointing recompute_granularity",
            "train.recompute_layers": "recompute_num_layers",
            "train.distributed_optimizer": "use_distributed_optimizer",
            "train.compile": "torch_compile",
            "optimizer.lr": "learning_rate max_lr",
            "optimizer.schedule": "lr_scheduler lr_scheduler_type lr_decay_style",
            "optimizer.warmup_steps": "lr_warmup_iters lr_warmup_steps num_warmup_steps",
            "optimizer.warmup_ratio": "lr_warmup_fraction lr_warmup_steps_ratio",
            "optimizer.decay_steps": "lr_decay_iters lr_decay_steps",
            "optimizer.clip_grad": "max_grad_norm gradient_clipping grad_clip",
            "optimizer.beta1": "adam_beta1",
            "optimizer.beta2": "adam_beta2",
            "optimizer.epsilon": "adam_epsilon adam_eps eps",
            "data.seq_length": "sequence_len max_length max_seq_length max_seq_len sequence_length cutoff_len",
            "data.packing": "sample_packing pack_sequences use_dynamic_bsz",
            "data.seed": "data_seed",
            "data.train": "train_files data_path dataset datasets train_dataset",
            "data.valid": "val_files eval_dataset test_datasets",
            "data.split": "val_set_size split_dataset_ratio",
            "data.too_long": "truncation truncation_strategy excess_length_strategy",
            "data.tokenizer": "tokenizer_model tokenizer_path",
            "model.hf": "base_model model_name_or_path pretrained_model_name_or_path",
            "model.backend": "attention_backend attn_implementation flash_attention use_flash_attn",
            "adapter.rank": "lora_r lora_rank",
            "adapter.alpha": "lora_alpha",
            "adapter.dropout": "lora_dropout",
            "adapter.modules_to_save": "lora_modules_to_save modules_to_save",
            "adapter.targets": "lora_target_modules target_modules lora_target_linear",
            "run.dir": "output_dir save_dir default_local_dir",
            "run.name": "run_name experiment_name wandb_name wandb_exp_name",
            "checkpoint.interval_steps": "save_steps save_interval save_freq",
            "checkpoint.keep_last": "save_total_limit max_ckpt_to_keep",
            "checkpoint.initialize_from": "load pretrained_checkpoint",
            "valid.interval_steps": "eval_steps eval_interval test_freq",
            "metrics.console_interval_steps": "logging_steps log_interval",
            "metrics.trackers": "report_to logger wandb",
            "metrics.project": "wandb_project project_name",
        }.items()
        for name in names.split()
    },
}
"""Key of Megatron-LM, transformers, axolotl, ms-swift or verl -> ours."""
