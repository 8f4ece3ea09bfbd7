# ruff: noqa: SIM905 - many names read better as words than as strings
"""Arguments of ms-swift as a configuration: of `megatron sft` and its sisters, and of `swift sft`.

Source: ms-swift 4.6.0, swift/megatron/arguments, swift/arguments and swift/trainers/arguments.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.command_lines import after_launcher, is_variable, options
from mtrain.config.foreign.megatron_arguments import BALANCE
from mtrain.config.foreign.trainers import (
    PREFERENCES,
    SCHEDULES,
    drop_adapter_of_full_runs,
    files_of,
    finish,
    folder_of,
    held_out,
    is_on,
    lora,
    optimizer_of,
    packing_of,
    permit_layout_dependent,
    put_interval,
    put_length,
    put_likelihood,
    put_warmup,
    put_whole_batch,
    recomputed,
    reward_model,
    saved,
    targets,
    trackers,
)
from mtrain.config.foreign.translation import (
    UNUSED,
    Row,
    Settings,
    Translation,
    above_0,
    choice,
    later,
    lost,
    to,
    translated,
)
from mtrain.config.foreign.values import boolean, listed, number, scalar
from mtrain.config.load import read_file

_SHUFFLED = "samples are always in an order that follows from train.seed"
_TOO_LONG = {"delete": "drop", "left": "start", "right": "end", "split": "split"}


def _adapter(found: Translation, value: Any, name: str) -> None:
    if value in ("lora", "dora"):
        found.put("adapter.kind", value, name)
    elif value != "full":
        found.lost.append(f"{name}={value}: adapters are lora and dora")


def _preference(found: Translation, value: Any, name: str) -> None:
    if value == "rm":
        reward_model(found, True, f"{name}=rm")
    else:
        choice("loss.function", {each: each for each in PREFERENCES}).put(found, value, name)


def _columns(found: Translation, value: Any, name: str) -> None:
    given = scalar(value) if isinstance(value, str) else value
    ours = {"query": "prompt", "response": "response", "messages": "messages", "tools": "tools"}
    if unknown := [str(each) for each in given.values() if each not in ours]:
        found.lost.append(f"{name}={given}: {', '.join(unknown)} is no key of a form here; see data.columns")
    found.put("data.columns", {key: ours[each] for key, each in given.items() if each in ours} or None, name)


def _tokens(found: Translation, value: Any, name: str) -> None:
    tokens = [each for each in listed(value) if not each.endswith(".txt")]
    if files := [each for each in listed(value) if each.endswith(".txt")]:
        found.lost.append(f"{name}={', '.join(files)}: model.add_special_tokens takes the tokens, not a file")
    found.put("model.add_special_tokens", tokens or None, name)


def _start(found: Translation, value: Any, name: str) -> None:
    """Puts the checkpoint to start from, which replaces the weights of a folder."""
    if found.get("model.hf") is None:
        found.put("checkpoint.initialize_from", value, name)
    else:
        found.lost.append(
            f"{name}={value}: model.hf gives the weights; to start from this, write out `model` in the place of "
            "model.hf, and set checkpoint.initialize_from"
        )


_BY_RECORDS: dict[str, Row] = {
    "model": Row(folder_of),
    "dataset": Row(files_of("data.train")),
    "val_dataset": Row(files_of("data.valid")),
    "split_dataset_ratio": Row(held_out),
    "columns": Row(_columns),
    "max_length": to("data.seq_length"),
    "truncation_strategy": choice("data.too_long", _TOO_LONG, "delete"),
    "packing": Row(packing_of("rows")),
    "packing_length": to("train.tokens_per_micro_batch"),
    "loss_scale": choice("data.loss_on", {"default": "all_answers", "last_round": "last_answer"}, "default"),
    "enable_dft_loss": choice("loss.function", {True: "dft", False: None}),
    "template": lost("conversations are written by the tokenizer's template; see data.chat_template", ""),
    "system": lost("write the system's message into the records", ""),
    "use_chat_template": lost("data.format=text trains texts without a template", True),
    "new_special_tokens": Row(_tokens),
    "torch_dtype": later(lambda value: {"bfloat16": 1, "float16": 1, "float32": 1, "auto": 1}[value]),
    "seed": to("train.seed", 42),
    "data_seed": to("data.seed", 42),
    "dataset_shuffle": lost(_SHUFFLED, True),
    "train_dataloader_shuffle": lost(_SHUFFLED, True),
    "group_by_length": lost(_SHUFFLED),
    **lora(rank=8, alpha=32.0, dropout=0.05),
    "target_modules": Row(targets),
    "modules_to_save": Row(saved),
    "lora_bias": lost("biases do not learn next to adapters", "none"),
    "use_dora": choice("adapter.kind", {True: "dora", False: None}),
    "output_dir": to("run.dir"),
    "save_steps": later(number, 500),
    "save_total_limit": to("checkpoint.keep_last", change=above_0),
    "save_strategy": lost("checkpoint.interval_steps is a number of steps", "steps"),
    "logging_steps": to("metrics.console_interval_steps", 5),
    "report_to": Row(trackers),
    "wandb_project": to("metrics.project"),
    "rlhf_type": Row(_preference),
    "beta": to("loss.options.beta", change=number),
    "label_smoothing": to("loss.options.label_smoothing", change=number),
    "desirable_weight": to("loss.options.desirable_weight", change=number),
    "undesirable_weight": to("loss.options.undesirable_weight", change=number),
    "center_rewards_coefficient": to("loss.options.center_rewards_coefficient", change=number),
    "simpo_gamma": to("loss.options.gamma", change=number),
    "rpo_alpha": lost("the likelihood of the chosen answer is no part of dpo here; see loss.side_terms", 0),
    "reference_free": lost("dpo and kto compare with a reference model"),
    "loss_type": lost("the losses are those of their papers", "sigmoid"),
    "ref_model": to("loss.reference"),
    **dict.fromkeys("bf16 fp16".split(), later(boolean)),
    **dict.fromkeys("eval_steps num_labels cpo_alpha".split(), later(number)),
    **dict.fromkeys("task_type problem_type".split(), later(str)),
    **dict.fromkeys(
        """
        dataset_num_proc dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor load_from_cache_file lazy_tokenize streaming use_hf strict packing_num_proc
        packing_strategy save_safetensors safe_serialization max_shard_size ddp_timeout ddp_backend attn_impl
        val_dataset_shuffle download_mode load_args load_data_args add_version create_checkpoint_symlink hub_token
        padding_free padding_side callbacks external_plugins custom_register_path check_model logging_dir
        tensorboard_dir local_rank remove_unused_columns save_only_model dataloader_drop_last log_completions
        experts_impl
        """.split(),
        UNUSED,
    ),
}
"""Argument of all ms-swift commands -> treatment."""
MEGATRON: dict[str, Row] = {
    **_BY_RECORDS,
    "micro_batch_size": to("train.micro_batch_size", 1),
    "global_batch_size": to("train.global_batch_size", 16),
    "tensor_model_parallel_size": to("layout.tp", 1),
    "pipeline_model_parallel_size": to("layout.pp", 1),
    "virtual_pipeline_model_parallel_size": to("layout.vpp"),
    "decoder_first_pipeline_num_layers": to("layout.first_stage_layers"),
    "decoder_last_pipeline_num_layers": to("layout.last_stage_layers"),
    "context_parallel_size": to("layout.cp", 1),
    "expert_model_parallel_size": to("layout.ep", 1),
    "expert_tensor_parallel_size": to("layout.etp", 1),
    "sequence_parallel": to("layout.sp", False),
    "recompute_granularity": Row(recomputed, "selective"),
    "recompute_modules": UNUSED,
    "min_lr": to("optimizer.min_lr", 0.0),
    "lr_decay_style": choice("optimizer.schedule", SCHEDULES, "cosine"),
    "lr_decay_iters": to("optimizer.decay_steps"),
    "lr_wsd_decay_iters": to("optimizer.decay_steps"),
    "lr_wsd_decay_style": later(str, "exponential"),
    "lr_warmup_init": lost("a warm-up begins at 0", 0),
    "lr_warmup_iters": later(number, 0),
    "weight_decay": to("optimizer.weight_decay", 0.1),
    "weight_decay_incr_style": lost("the weight decay is the same in all steps", "constant"),
    "clip_grad": to("optimizer.clip_grad", 1.0),
    "adam_beta1": to("optimizer.beta1", 0.9),
    "adam_beta2": to("optimizer.beta2", 0.95),
    "adam_eps": to("optimizer.epsilon", 1e-8),
    "optimizer": Row(optimizer_of, "adam"),
    "use_distributed_optimizer": to("train.distributed_optimizer", True),
    "overlap_grad_reduce": to("train.overlap_grad_reduce", False),
    "overlap_param_gather": to("train.overlap_param_gather", False),
    "optimizer_cpu_offload": to("train.offload_optimizer", False),
    "tuner_type": Row(_adapter, "full"),
    "train_type": Row(_adapter),
    "adapters": to("adapter.path", change=lambda value: value[0] if isinstance(value, list) else value),
    "moe_aux_loss_coeff": later(lambda value: [number(each) for each in listed(value)]),
    "moe_z_loss_coeff": to("loss.router.z_coefficient"),
    "moe_expert_capacity_factor": to("model.experts.capacity_factor"),
    "moe_token_drop_policy": lost("of tokens above the capacity those with the least probability are dropped", "probs"),
    "moe_pad_expert_input_to_capacity": lost("experts are not padded to their capacity"),
    "mtp_num_layers": to("model.mtp_depths"),
    "mtp_loss_scaling_factor": to("loss.mtp_coefficient", 0.1),
    "fp8_format": to("train.fp8"),
    "fp8_recipe": later(str, "delayed"),
    "save": to("run.dir"),
    "eval_iters": later(number, -1),
    "log_interval": to("metrics.console_interval_steps"),
    "load": Row(_start),
    "mcore_model": Row(_start),
    "mcore_adapter": lost("adapter.path is a folder of PEFT", ""),
    "wandb_exp_name": to("run.name"),
    "async_save": to("checkpoint.async_save", False),
    "finetune": lost("a run folder goes on by itself; other checkpoints give their weights alone", True),
    **dict.fromkeys(
        """
        train_iters num_train_epochs max_epochs recompute_num_layers lr lr_warmup_fraction save_interval eval_interval
        """.split(),
        later(number),
    ),
    **dict.fromkeys("recompute_method moe_router_load_balancing_type".split(), later(str)),
    "calculate_per_token_loss": later(boolean),
    **dict.fromkeys(
        """
        attention_backend cross_entropy_loss_fusion cross_entropy_fusion_impl no_save_optim no_save_rng no_load_optim
        no_load_rng num_workers moe_grouped_gemm moe_permute_fusion moe_shared_expert_overlap
        moe_token_dispatcher_type moe_router_dtype moe_enable_deepep use_flash_attn merge_lora
        use_precision_aware_optimizer optimizer_offload_fraction tp_comm_overlap cp_comm_type bias_dropout_fusion
        masked_softmax_fusion bias_activation_fusion apply_rope_fusion gradient_accumulation_fusion manual_gc
        manual_gc_steps attention_softmax_in_fp32 tensorboard_queue_size align_param_gather align_grad_reduce
        use_persistent_ckpt_worker bridge_backend freeze_llm freeze_vit freeze_aligner vit_gradient_checkpointing
        """.split(),
        UNUSED,
    ),
}
"""Argument of `megatron sft`, `megatron pt` and `megatron rlhf` -> treatment."""
MS_SWIFT: dict[str, Row] = {
    **_BY_RECORDS,
    "per_device_train_batch_size": to("train.micro_batch_size", 1),
    "num_train_epochs": later(number, 3.0),
    "lr_scheduler_type": choice("optimizer.schedule", SCHEDULES, "cosine"),
    "lr_scheduler_kwargs": lost("no key here corresponds"),
    "warmup_ratio": later(number, 0.0),
    "weight_decay": to("optimizer.weight_decay", 0.1),
    "max_grad_norm": to("optimizer.clip_grad", 1.0),
    "adam_beta1": to("optimizer.beta1", 0.9),
    "adam_beta2": to("optimizer.beta2", 0.95),
    "adam_epsilon": to("optimizer.epsilon", 1e-8),
    "optim": Row(optimizer_of, "adamw_torch_fused"),
    "tuner_type": Row(_adapter, "lora"),
    "train_type": Row(_adapter),
    "adapters": MEGATRON["adapters"],
    "gradient_checkpointing": Row(recomputed, True),
    "sequence_parallel_size": to("layout.cp", 1),
    "router_aux_loss_coef": lost(
        "see loss.router.sequence_balance_coefficient, which is the same under every layout", 0
    ),
    "acc_strategy": choice("loss.aggregation", {"token": "token-mean", "seq": "seq-mean-token-mean"}, "token"),
    "run_name": to("run.name"),
    "quant_bits": lost("weights are not quantized here", 0),
    "quant_method": lost("weights are not quantized here", ""),
    **dict.fromkeys("gradient_accumulation_steps max_steps learning_rate warmup_steps".split(), later(number)),
    **dict.fromkeys(
        """
        deepspeed fsdp fsdp_config per_device_eval_batch_size eval_strategy evaluation_strategy use_liger_kernel
        gradient_checkpointing_kwargs logging_first_step resume_from_checkpoint resume_only_model
        load_best_model_at_end metric_for_best_model tuner_backend freeze_llm freeze_vit freeze_aligner push_to_hub
        """.split(),
        UNUSED,
    ),
}
"""Argument of `swift sft`, `swift pt` and `swift rlhf` -> treatment."""


def from_ms_swift(arguments: Sequence[str]) -> Translation:
    """Translates the arguments of `megatron` or `swift` sft, pt and rlhf; skips what precedes them, except a file of
    arguments.

    Raises:
        ConfigError: There are no arguments, or their file cannot be read.
    """
    command, words = after_launcher(arguments, ("sft", "pt", "rlhf"))
    values, before = options(words, lambda name: name.replace("-", "_"))
    given: dict[str, Any] = {}
    for word in before:
        if word.endswith((".yaml", ".yml", ".json")):
            given.update(read_file(Path(word)).content)
    table = _table(command, {*given, *values})
    found = Translation("ms-swift")
    for name, each in values.items():
        is_off = name not in table and name.startswith("no_") and name[3:] in table and not each
        if variables := [value for value in each if is_variable(value)]:
            found.wrong.append(f"--{name} {' '.join(variables)}: this is a variable of the shell; write its value")
        else:
            value = each[0] if len(each) == 1 else each
            given[name[3:] if is_off else name] = value if each else not is_off
    if not given and not found.wrong:
        raise ConfigError("there are no arguments that begin with --; give those of `megatron sft`")
    run = translated(found, given, table)
    of_engine = (_of_megatron, _experts, _eight_bits) if "train_iters" in table else (_of_transformers,)
    for put in (_precision, _head, *of_engine):
        put(found, run)
    is_adapted = any(run[name] not in (None, "full") for name in ("tuner_type", "train_type"))
    is_adapted = is_adapted and run["train_type"] != "full"
    drop_adapter_of_full_runs(found, is_adapted=is_adapted)
    _rate(found, run, "lr" if "lr" in table else "learning_rate", is_adapted=is_adapted)
    if "rlhf" in command and run["rlhf_type"] is None:
        found.put("loss.function", "dpo", "ms-swift's default of rlhf_type")
    _places(found, run, "megatron_output" if "train_iters" in table else "output")
    found.notes.append("ms-swift writes conversations by templates of its own; here the tokenizer's is taken")
    finish(found, run)
    return found


def _table(command: Sequence[str], names: set[str]) -> dict[str, Row]:
    """Returns the rows of `megatron` or `swift`, by the command or by arguments that only one has."""
    text = " ".join(command)
    is_megatron = "megatron" in text or ("swift" not in text and not names & (MS_SWIFT.keys() - MEGATRON.keys()))
    table = dict(MEGATRON if is_megatron else MS_SWIFT)
    if "rlhf" in command:
        table["loss_scale"] = Row(table["loss_scale"].put, "last_round")
    if "pt" in command:
        table["loss_scale"] = Row(table["loss_scale"].put, "all")
        table["use_chat_template"] = lost("conversations are written by a template", False)
    return table


def _precision(found: Translation, run: Settings) -> None:
    """Puts the precision; torch_dtype decides without bf16 and fp16."""
    names = ("bf16", "fp16", "torch_dtype")
    kind = run["torch_dtype"] if run["torch_dtype"] != "auto" else None
    is_16 = is_on(run, "fp16") if run["fp16"] is not None else kind in ("float16", "float32")
    is_brain = is_on(run, "bf16") if run["bf16"] is not None else kind in (None, "bfloat16")
    found.put("train.precision", "fp16" if is_16 else "bf16" if is_brain else "fp32", run.said(*names))


def _head(found: Translation, run: Settings) -> None:
    kind, count = run["task_type"] or "causal_lm", run["num_labels"]
    if kind == "seq_cls" and run["problem_type"] != "multi_label_classification":
        is_number = run["problem_type"] == "regression" or (count is not None and number(count) == 1)
        found.put(
            "loss.function", "regression" if is_number else "classification", run.said("task_type", "problem_type")
        )
        found.put("model.num_labels", count, run.origin("num_labels"))
    elif kind != "causal_lm":
        found.lost.append(f"{run.said('task_type', 'problem_type')}: heads are classification and regression")


def _rate(found: Translation, run: Settings, name: str, *, is_adapted: bool) -> None:
    default = 1e-4 if is_adapted else 1e-5
    found.put("optimizer.lr", default if run[name] is None else run[name], run.origin(name))


def _of_megatron(found: Translation, run: Settings) -> None:
    epochs = "max_epochs" if "max_epochs" in run.given else "num_train_epochs"
    if run[epochs] is not None:  # takes precedence over a number of steps
        found.put("train.num_epochs", run[epochs], run.origin(epochs))
    else:
        put_length(found, run, "train_iters", epochs)
    share, end = run["lr_warmup_fraction"], found.get("optimizer.decay_steps")
    if share is not None and end is not None and found.get("optimizer.schedule") != "wsd":
        steps = math.ceil(Fraction(str(share)) * end)
        found.put("optimizer.warmup_steps", steps, "lr_warmup_fraction x lr_decay_iters")
    else:
        put_warmup(found, run, "lr_warmup_iters", "lr_warmup_fraction", rounds_up=True)
    if run["tensor_model_parallel_size"] in (None, 1, "1"):
        found.drop("layout.sp")
    if found.get("optimizer.schedule") == "wsd" and run["lr_wsd_decay_style"] != "linear":
        found.lost.append(f"lr_wsd_decay_style={run['lr_wsd_decay_style']}: wsd falls linearly here")
    layers = run["recompute_num_layers"]
    if found.get("train.recompute") == "full" and run["recompute_method"] == "block" and layers is not None:
        found.put("train.recompute_layers", layers, run.origin("recompute_num_layers"))
    is_given = run["calculate_per_token_loss"] is not None
    if not (is_on(run, "calculate_per_token_loss") if is_given else run["rlhf_type"] is None):
        found.notes.append(
            "calculate_per_token_loss=false averages the means of microbatches and data-parallel ranks; "
            "loss.aggregation=token-mean is the mean over all tokens, under every layout"
        )
    count, size = number(run["eval_iters"]), found.get("train.global_batch_size")
    if count > 0:
        found.put("valid.max_samples", count * size, "eval_iters x global_batch_size")


def _experts(found: Translation, run: Settings) -> None:
    kinds = listed(run["moe_router_load_balancing_type"] or "aux_loss")
    coefficients = [number(each) for each in listed(run["moe_aux_loss_coeff"] or 0)]
    for kind, coefficient in zip(kinds, coefficients * len(kinds) if len(coefficients) == 1 else coefficients):
        if kind in BALANCE and coefficient:
            found.put(BALANCE[kind], coefficient, f"moe_aux_loss_coeff, moe_router_load_balancing_type={kind}")
        elif kind not in BALANCE and kind != "none":
            found.lost.append(f"moe_router_load_balancing_type={kind}: known are {', '.join(BALANCE)} and none")
    permit_layout_dependent(found)


def _eight_bits(found: Translation, run: Settings) -> None:
    if run["fp8_format"] is not None and run["fp8_recipe"] == "delayed":
        found.lost.append("fp8_recipe=delayed, ms-swift's default: its scales are in no checkpoint here")
    elif run["fp8_format"] is not None:
        found.put("train.fp8_recipe", run["fp8_recipe"], run.origin("fp8_recipe"))


def _of_transformers(found: Translation, run: Settings) -> None:
    put_length(found, run, "max_steps", "num_train_epochs")
    put_warmup(found, run, "warmup_steps", "warmup_ratio", rounds_up=True)
    if run["lr_scheduler_type"] == "constant":
        found.drop("optimizer.warmup_steps")
        found.drop("optimizer.warmup_ratio")
    if run["gradient_accumulation_steps"] is None:
        found.put("train.global_batch_size", 16, "ms-swift's default of gradient_accumulation_steps, for 16 samples")
    else:
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        put_whole_batch(found, run, names, is_of_one_rank=True)


def _places(found: Translation, run: Settings, parent: str) -> None:
    """Puts the run folder and its checkpoint limit, by default none."""
    for name in ("save_interval", "save_steps"):
        put_interval(found, run, name, "checkpoint.interval_steps")
    for name in ("eval_interval", "eval_steps"):
        put_interval(found, run, name, "valid.interval_steps")
    if isinstance(run["model"], str):
        found.put("run.dir", f"{parent}/{Path(run['model']).name}", "ms-swift's default of output_dir")
    interval = found.get("checkpoint.interval_steps")
    if found.get("loss.function") == "simpo":
        put_likelihood(found, run)
    if interval and found.get("checkpoint.keep_last") is None:
        found.put("checkpoint.keep_every_steps", interval, "ms-swift's default of save_total_limit, which keeps all")
    if found.get("data.valid"):
        found.drop("data.split")  # ms-swift ignores the share then
    if found.get("valid.interval_steps") is None:
        found.put("valid.interval_steps", interval, "ms-swift's default of eval_steps")
    if run["eval_iters"] is not None and number(run["eval_iters"]) == 0:
        found.drop("valid")
    if "wandb" not in listed(run["report_to"] or []):
        found.drop("metrics.project")
