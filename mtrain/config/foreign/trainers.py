# ruff: noqa: SIM905 - many names read better as words than as strings
"""Files of axolotl, and arguments of ms-swift's `megatron sft`, as a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.translation import Put, Translation, constant, lost, no_effect, scalar, to
from mtrain.config.load import read_file
from mtrain.config.schema.adapter import SAVED_SYNONYMS

SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "WSD": "wsd",
}
_PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo")
_AS_MESSAGES = {
    "chat_template": "messages",
    "chat_template.default": "messages",
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "completion": "text",
}


def recomputed(found: Translation, value: Any, name: str) -> None:
    if value and value != "none":
        found.put("train.recompute", "selective" if value == "selective" else "full", name)


def _adapter(found: Translation, value: Any, name: str) -> None:
    if value == "qlora":
        found.lost.append(f"{name}=qlora: weights in 4 bits; adapter.base_dtype=bf16 halves those of float32")
    if value in ("lora", "qlora"):
        found.put("adapter.kind", "lora", name)
    elif value not in ("full", None):
        found.lost.append(f"{name}={value}: adapters are lora and dora")


def _held_out(found: Translation, value: Any, name: str) -> None:
    if isinstance(value, int) and value >= 1:
        found.lost.append(f"{name}={value}: data.split takes shares, not a number of records; name data.valid")
    else:
        found.put("data.split", [1 - value, value, 0.0], f"{name}, by records in file order")


_ROLES = {"messages": {"role": "role", "content": "content"}, "sharegpt": {"role": "from", "content": "value"}}
"""Form -> field of the form for each field of a message, as axolotl names them."""


def _left_of_dataset(given: Mapping[str, Any], form: str) -> Iterator[str]:
    """Yields the keys of a dataset that the form does not say."""
    for key, value in given.items():
        roles = value.items() if key == "message_property_mappings" else ()
        if key in ("path", "type") or (key, value) in (("split", "train"), ("ds_type", "json"), ("ds_type", "parquet")):
            continue
        if key == "field_messages" and value == {"messages": "messages", "sharegpt": "conversations"}.get(form):
            continue
        if roles and all(_ROLES.get(form, {}).get(ours) == theirs for ours, theirs in roles):
            continue
        yield key


def _datasets(found: Translation, value: Any, name: str) -> None:
    """Puts axolotl's list of datasets; all have one form here."""
    sources, formats = [], set()
    for each in value if isinstance(value, list) else [value]:
        given = each if isinstance(each, Mapping) else {"path": each}
        if not isinstance(given.get("path"), str):
            found.lost.append(f"{name}: a dataset without a path")
            continue
        sources.append({"path": given["path"]})
        kind = str(given.get("type", "chat_template"))
        if kind not in _AS_MESSAGES:
            found.lost.append(
                f"{name}: type={kind}; data.format is one of {', '.join(dict.fromkeys(_AS_MESSAGES.values()))}"
            )
        form = _AS_MESSAGES.get(kind, kind)
        if form == "messages" and given.get("field_messages") == "conversations":
            form = "sharegpt"
        formats.add(form)
        found.lost += [f"{name}: {key}={given[key]}" for key in _left_of_dataset(given, form)]
    found.put("data.kind", "sft", name)
    found.put(f"data.{'valid' if name == 'test_datasets' else 'train'}", sources, f"{name}; paths on this machine")
    if len(formats) == 1:
        found.put("data.format", formats.pop(), f"{name}: type")
    elif formats:
        found.lost.append(
            f"{name}: forms {', '.join(sorted(formats))}; data.format is one for all, so convert the others"
        )


def files_of(key: str) -> Put:
    def put(found: Translation, value: Any, name: str) -> None:
        paths = value if isinstance(value, list) else [value]
        found.put("data.kind", "sft", name)
        found.put(key, [{"path": path} for path in paths], f"{name}; paths on this machine")

    return put


def folder_of(found: Translation, value: Any, name: str) -> None:
    found.put("model.hf", value, f"{name}; a folder: hf download {value} --local-dir DIR")
    found.content.setdefault("data", {}).setdefault("tokenizer", value)
    found.origins.setdefault("data.tokenizer", f"{name}: of the same folder")


def packing_of(batch: str) -> Put:
    return lambda found, value, name: found.put("data.packing", {"batch": batch}, name) if value else None


def trackers(found: Translation, value: Any, name: str) -> None:
    known = [each for each in (value if isinstance(value, list) else [value]) if each in ("wandb", "mlflow", "trackio")]
    found.put("metrics.trackers", known or None, name)


def _wandb(found: Translation, value: Any, name: str) -> None:
    found.put("metrics.trackers", ["wandb"], name)
    found.put("metrics.project", value, name)


def optimizer_of(found: Translation, value: Any, name: str) -> None:
    if "adam" in str(value).lower():
        found.put("optimizer.kind", "adamw", f"{name}={value}")
    else:
        found.lost.append(f"{name}={value}: optimizer.kind is adamw or muon")


def _template(found: Translation, value: Any, name: str) -> None:
    """Puts the tokenizer's own template; names of templates that the program has are lost."""
    if value in ("tokenizer_default", "jinja"):
        found.put("data.chat_template", "auto", f"{name}={value}")
    else:
        found.lost.append(
            f"{name}={value}: data.chat_template takes auto (the tokenizer's own), plain, the name of one of the "
            "tokenizer's templates or the path of a .jinja file"
        )


def _special_tokens(found: Translation, value: Mapping[str, Any], name: str) -> None:
    """Names the tokens that are given another text; the one for padding is never in the loss."""
    others = {role: text for role, text in value.items() if role != "pad_token"}
    if others:
        found.lost.append(f"{name}={others}: the tokenizer's own tokens are used; change its tokenizer_config.json")


def _last_rate(found: Translation, value: Any, name: str) -> None:
    """Puts the learning rate that the decay ends with, which is given as a part of the first one."""
    found.put("optimizer.min_lr", value * found.content["optimizer"]["lr"], f"{name} x learning rate")


def _saved(found: Translation, value: Any, name: str) -> None:
    modules = value if isinstance(value, list) else [value]
    if unknown := [str(each) for each in modules if each not in SAVED_SYNONYMS]:
        found.lost.append(
            f"{name}={', '.join(unknown)}: of modules only embed_tokens, lm_head and a head learn whole with adapters"
        )
    found.put("adapter.modules_to_save", [each for each in modules if each in SAVED_SYNONYMS] or None, name)


_LORA: dict[str, Put] = {
    "lora_r": to("adapter.rank"),
    "lora_rank": to("adapter.rank"),
    "lora_alpha": to("adapter.alpha", float),
    "lora_dropout": to("adapter.dropout"),
    "lora_target_modules": to("adapter.targets"),
    "lora_target_linear": to("adapter.targets", lambda _: "all-linear"),
    "lora_modules_to_save": _saved,
    "modules_to_save": _saved,
    "peft_use_dora": to("adapter.kind", lambda _: "dora"),
    "peft_use_rslora": to("adapter.scaling", lambda _: "rslora"),
    "use_rslora": to("adapter.scaling", lambda _: "rslora"),
}
_NO_4_BITS = lost("weights are not quantized here")
AXOLOTL: dict[str, Put] = {
    **_LORA,
    "base_model": folder_of,
    "datasets": _datasets,
    "test_datasets": _datasets,
    "val_set_size": _held_out,
    "chat_template": _template,
    "special_tokens": _special_tokens,
    "tokens": to("model.add_tokens"),
    "chat_template_jinja": to("data.chat_template"),
    "sequence_len": to("data.seq_length"),
    "excess_length_strategy": constant("data.too_long", {"drop": "drop", "truncate": "end", "raise": "refuse"}),
    "sample_packing": packing_of("rows"),
    "micro_batch_size": to("train.micro_batch_size"),
    "max_steps": to("train.num_steps"),
    "num_epochs": to("train.num_epochs"),
    "learning_rate": to("optimizer.lr", float),
    "lr_scheduler": constant("optimizer.schedule", SCHEDULES),
    "cosine_min_lr_ratio": _last_rate,
    "warmup_steps": to("optimizer.warmup_steps"),
    "warmup_ratio": to("optimizer.warmup_ratio"),
    "weight_decay": to("optimizer.weight_decay"),
    "max_grad_norm": to("optimizer.clip_grad"),
    "adam_beta1": to("optimizer.beta1"),
    "adam_beta2": to("optimizer.beta2"),
    "adam_epsilon": to("optimizer.epsilon", float),
    "optimizer": optimizer_of,
    "bf16": to("train.precision", lambda _: "bf16"),
    "fp16": to("train.precision", lambda _: "fp16"),
    "seed": to("train.seed"),
    "data_seed": to("data.seed"),
    "adapter": _adapter,
    "gradient_checkpointing": recomputed,
    "context_parallel_size": to("layout.cp"),
    "sequence_parallel_degree": to("layout.cp"),
    "tensor_parallel_size": to("layout.tp"),
    "expert_parallel_size": to("layout.ep"),
    "output_dir": to("run.dir"),
    "save_steps": to("checkpoint.interval_steps"),
    "save_total_limit": to("checkpoint.keep_last"),
    "eval_steps": to("valid.interval_steps"),
    "logging_steps": to("metrics.console_interval_steps"),
    "wandb_project": _wandb,
    "wandb_name": to("run.name"),
    "rl": constant("loss.function", {name: name for name in _PREFERENCES}),
    "rl_beta": to("loss.options.beta", float),
    "orpo_alpha": to("loss.options.beta", float),
    "dpo_label_smoothing": to("loss.options.label_smoothing", float),
    "simpo_gamma": to("loss.options.gamma", float),
    "kto_desirable_weight": to("loss.options.desirable_weight", float),
    "kto_undesirable_weight": to("loss.options.undesirable_weight", float),
    "load_in_4bit": _NO_4_BITS,
    "load_in_8bit": _NO_4_BITS,
    "train_on_inputs": lost("prompts are never in the loss of conversations; data.format=text trains whole texts"),
    "group_by_length": lost("the order of samples follows from train.seed; packing fills the rows"),
    **dict.fromkeys(
        """
        flash_attention sdp_attention xformers_attention tf32 deepspeed fsdp fsdp_config fsdp_version dp_shard_size
        dp_replicate_size pad_to_sequence_len eval_sample_packing dataset_prepared_path dataset_processes
        gradient_checkpointing_kwargs auto_resume_from_checkpoints resume_from_checkpoint save_safetensors debug
        wandb_entity wandb_watch wandb_log_model wandb_run_id tokenizer_type model_type trust_remote_code
        gradient_accumulation_steps plugins local_rank save_first_step hub_model_id eval_batch_size strict
        liger_rope liger_rms_norm liger_glu_activation liger_fused_linear_cross_entropy is_llama_derived_model
        roles_to_train lora_mlp_kernel lora_qkv_kernel lora_o_kernel
        """.split(),
        no_effect,
    ),
}
"""Key of axolotl -> what becomes of its value."""

MS_SWIFT: dict[str, Put] = {
    **_LORA,
    "model": folder_of,
    "dataset": files_of("data.train"),
    "val_dataset": files_of("data.valid"),
    "split_dataset_ratio": _held_out,
    "max_length": to("data.seq_length"),
    "truncation_strategy": constant(
        "data.too_long", {"delete": "drop", "left": "start", "right": "end", "split": "split"}
    ),
    "packing": packing_of("rows"),
    "loss_scale": constant("data.loss_on", {"default": "all_answers", "last_round": "last_answer"}),
    "micro_batch_size": to("train.micro_batch_size"),
    "global_batch_size": to("train.global_batch_size"),
    "train_iters": to("train.num_steps"),
    "num_train_epochs": to("train.num_epochs"),
    "max_epochs": to("train.num_epochs"),
    "tensor_model_parallel_size": to("layout.tp"),
    "pipeline_model_parallel_size": to("layout.pp"),
    "virtual_pipeline_model_parallel_size": to("layout.vpp"),
    "context_parallel_size": to("layout.cp"),
    "expert_model_parallel_size": to("layout.ep"),
    "expert_tensor_parallel_size": to("layout.etp"),
    "sequence_parallel": to("layout.sp"),
    "recompute_granularity": recomputed,
    "lr": to("optimizer.lr", float),
    "min_lr": to("optimizer.min_lr", float),
    "lr_decay_style": constant("optimizer.schedule", SCHEDULES),
    "lr_warmup_fraction": to("optimizer.warmup_ratio"),
    "lr_warmup_iters": to("optimizer.warmup_steps"),
    "weight_decay": to("optimizer.weight_decay"),
    "clip_grad": to("optimizer.clip_grad"),
    "adam_beta1": to("optimizer.beta1"),
    "adam_beta2": to("optimizer.beta2"),
    "adam_eps": to("optimizer.epsilon", float),
    "optimizer": optimizer_of,
    "tuner_type": _adapter,
    "train_type": _adapter,
    "target_modules": to("adapter.targets"),
    "moe_aux_loss_coeff": lost("see loss.router.sequence_balance_coefficient, which is the same under every layout"),
    "seed": to("train.seed"),
    "data_seed": to("data.seed"),
    "save": to("run.dir"),
    "output_dir": to("run.dir"),
    "load": to("checkpoint.initialize_from"),
    "mcore_model": to("checkpoint.initialize_from"),
    "save_interval": to("checkpoint.interval_steps"),
    "save_steps": to("checkpoint.interval_steps"),
    "save_total_limit": to("checkpoint.keep_last"),
    "eval_interval": to("valid.interval_steps"),
    "eval_steps": to("valid.interval_steps"),
    "log_interval": to("metrics.console_interval_steps"),
    "logging_steps": to("metrics.console_interval_steps"),
    "wandb_project": _wandb,
    "wandb_exp_name": to("run.name"),
    "report_to": trackers,
    "rlhf_type": constant("loss.function", {"dpo": "dpo", "kto": "kto"}),
    "beta": to("loss.options.beta", float),
    "label_smoothing": to("loss.options.label_smoothing", float),
    "desirable_weight": to("loss.options.desirable_weight", float),
    "undesirable_weight": to("loss.options.undesirable_weight", float),
    **dict.fromkeys(
        """
        attention_backend cross_entropy_loss_fusion finetune no_save_optim no_save_rng no_load_optim no_load_rng
        dataset_num_proc dataloader_num_workers num_workers recompute_method recompute_num_layers recompute_modules
        load_safetensors save_safetensors use_hf moe_grouped_gemm moe_permute_fusion moe_shared_expert_overlap
        use_flash_attn lazy_tokenize streaming load_from_cache_file merge_lora use_precision_aware_optimizer
        overlap_grad_reduce overlap_param_gather optimizer_cpu_offload tensorboard_dir torch_dtype
        """.split(),
        no_effect,
    ),
}
"""Argument of ms-swift -> what becomes of its value."""


def from_axolotl(path: Path) -> Translation:
    """Translates a file of axolotl.

    Raises:
        ConfigError: The file cannot be read.
    """
    given = read_file(path).content
    found = translated(Translation("axolotl"), given, AXOLOTL)
    micro, accumulation = given.get("micro_batch_size", 1), given.get("gradient_accumulation_steps", 1)
    if isinstance(micro, int) and isinstance(accumulation, int):
        found.put("train.global_batch_size", micro * accumulation, "micro_batch_size x gradient_accumulation_steps")
        found.notes.append(
            "train.global_batch_size is the whole batch: multiply it by the number of data-parallel ranks"
        )
    return found


def from_ms_swift(arguments: Sequence[str]) -> Translation:
    """Translates the arguments of ms-swift's `megatron sft`; what stands before the first of them is left out.

    Raises:
        ConfigError: There are no arguments.
    """
    given: dict[str, Any] = {}
    values: list[Any] = []
    for text in arguments:
        if text.startswith("--"):
            name, separator, value = text[2:].partition("=")
            values = given.setdefault(name, [])
            values += [scalar(value)] if separator else []
        else:
            values.append(scalar(text))
    if not given:
        raise ConfigError("there are no arguments that begin with --; give those of `megatron sft`")
    whole = {name: True if not each else each[0] if len(each) == 1 else each for name, each in given.items()}
    return translated(Translation("ms-swift"), whole, MS_SWIFT)


def translated(found: Translation, given: Mapping[str, Any], table: Mapping[str, Put]) -> Translation:
    """Puts every value that is given, names each of which nothing is kept, and returns `found`.

    A value that is null, false or empty switches something off that is off here.
    """
    for name, value in sorted(given.items(), key=lambda item: item[0] in _AFTER_OTHERS):
        if value is None or value is False or value in ("", [], {}):
            continue
        put, before = table.get(name), found.state()
        if put is None:
            found.lost.append(f"{name}={value}: no key here corresponds")
            continue
        try:
            put(found, value, name)
        except (TypeError, ValueError, LookupError, AttributeError):
            found.lost.append(f"{name}={value}: not a value that {found.program} takes")
        if found.state() == before:
            found.without_effect.append(name)
    if "num_steps" in found.content.get("train", {}):
        found.drop("train.num_epochs")
    if "warmup_steps" in found.content.get("optimizer", {}):
        found.drop("optimizer.warmup_ratio")
    is_full = "full" in (given.get("tuner_type"), given.get("train_type"))
    if is_full or not {"kind", "rank"} & found.content.get("adapter", {}).keys():
        found.drop("adapter")
    function = found.content.get("loss", {}).get("function")
    if function is None:
        found.drop("loss")
    elif function in _PREFERENCES:
        found.drop("data.format")
        found.notes.append("records are pairs of prompt, chosen and rejected, or prompt, completion and label for kto")
    found.notes.append(
        f"keys that are not given have the defaults of mtrain, which may be others than those of {found.program}"
    )
    return found


_AFTER_OTHERS = {"cosine_min_lr_ratio", "optim.min_lr_ratio", "actor_rollout_ref.actor.optim.min_lr_ratio"}
"""Keys whose value follows from that of another key."""
