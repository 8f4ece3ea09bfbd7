# ruff: noqa: SIM905 - many names read better as words than as strings
"""Files of axolotl as a configuration.

Source: axolotl 0.19.0, axolotl/utils/schemas and axolotl/core/builders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mtrain.config.foreign.trainers import (
    PREFERENCES,
    SCHEDULES,
    drop_adapter_of_full_runs,
    finish,
    folder_of,
    held_out,
    is_on,
    last_rate,
    lora,
    optimizer_of,
    packing_of,
    pattern_of,
    put_interval,
    put_length,
    put_likelihood,
    put_whole_batch,
    recomputed,
    reward_model,
    saved,
    targets,
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
    unless_0,
)
from mtrain.config.foreign.values import boolean, listed, number
from mtrain.config.load import read_file

_FORMS = {
    "chat_template": "messages",
    "chat_template.default": "messages",
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "completion": "text",
}
_OF_MESSAGES = {
    "messages": ("messages", {"role": "role", "content": "content"}),
    "sharegpt": ("conversations", {"role": "from", "content": "value"}),
}
"""Form -> its key of the messages, and the keys of a message, as axolotl names them."""
_SAME_OF_DATASETS: Mapping[str, tuple[Any, ...]] = {
    "split": ("train",),
    "ds_type": ("json", "parquet", "arrow"),
    "roles_to_train": (["assistant"], ["assistant", "gpt"]),
    "train_on_eos": ("turn",),
    "trust_remote_code": (True, False),
    "chat_template": ("tokenizer_default",),
    "drop_system_message": (False,),
    "shards": (1,),
}
"""Key of a dataset -> values that `mtrain` implies anyway."""
_READ_OF_DATASETS = frozenset(
    "path type field_messages message_property_mappings message_field_role message_field_content".split()
)
_FORMATS_OF_FILES = frozenset(("json", "parquet", "arrow", "csv", "text"))


def _datasets(found: Translation, value: Any, name: str) -> None:
    sources: list[dict[str, str]] = []
    formats: set[str] = set()
    for each in listed(value):
        given: Mapping[str, Any] = each if isinstance(each, Mapping) else {"path": each}
        if not isinstance(given.get("path"), str):
            found.wrong.append(f"{name}: a dataset without a path; name it")
            continue
        files = given.get("data_files") if given["path"] in _FORMATS_OF_FILES else None
        sources += [{"path": path} for path in listed(files or given["path"])]
        form, columns = _form_of(found, given, name)
        formats.add(form)
        if columns:
            found.put("data.columns", {**(found.get("data.columns") or {}), **columns}, f"{name}: field_messages")
        left = _left_of_dataset(given, has_read_files=files is not None)
        found.lost += [f"{name}: {key}={given[key]}: no key here corresponds" for key in left]
    found.put("data.kind", "sft", name)
    found.put(f"data.{'valid' if name == 'test_datasets' else 'train'}", sources, f"{name}; paths on this machine")
    if len(formats) == 1:
        found.put("data.format", formats.pop(), f"{name}: type")
    elif formats:
        found.lost.append(
            f"{name}: forms {', '.join(sorted(formats))}; data.format is one for all, so convert the others"
        )


def _form_of(found: Translation, given: Mapping[str, Any], name: str) -> tuple[str, dict[str, str]]:
    kind = given.get("type") or "chat_template"
    form = _FORMS.get(kind) if isinstance(kind, str) else None
    if form is None:
        found.lost.append(f"{name}: type={kind}; data.format is one of {', '.join(dict.fromkeys(_FORMS.values()))}")
        return "auto", {}
    if form not in _OF_MESSAGES:
        return form, {}
    old = {part: given.get(f"message_field_{part}") for part in ("role", "content")}
    roles = {"role": "role", "content": "content"} if form == "messages" else _OF_MESSAGES[form][1]
    roles |= {part: key for part, key in old.items() if key} | (given.get("message_property_mappings") or {})
    form = next((each for each, (_, known) in _OF_MESSAGES.items() if known == roles), "")
    if not form:
        found.lost.append(
            f"{name}: message_property_mappings={roles}: messages have role and content, or from and value"
        )
        return "auto", {}
    field = given.get("field_messages") or ("messages" if kind.startswith("chat_template") else "conversations")
    key = _OF_MESSAGES[form][0]
    return form, {} if field == key else {field: key}


def _left_of_dataset(given: Mapping[str, Any], *, has_read_files: bool) -> Iterator[str]:
    for key, value in given.items():
        is_read = key in _READ_OF_DATASETS or (key == "data_files" and has_read_files)
        if not is_read and value not in (None, "", [], {}) and value not in _SAME_OF_DATASETS.get(key, ()):
            yield key


def _template(found: Translation, value: Any, name: str) -> None:
    if value == "tokenizer_default":
        found.put("data.chat_template", "auto", f"{name}={value}")
    elif value != "jinja":  # which the next key names
        found.lost.append(
            f"{name}={value}: data.chat_template takes auto (the tokenizer's own), plain, the name of one of the "
            "tokenizer's templates or the path of a .jinja file"
        )


def _special_tokens(found: Translation, value: Mapping[str, Any], name: str) -> None:
    """Reports tokens with a different text, except padding, which is never in the loss."""
    others = {role: text for role, text in value.items() if role != "pad_token" and text}
    if others:
        found.lost.append(f"{name}={others}: the tokenizer's own tokens are used; change its tokenizer_config.json")


def _tokens(found: Translation, value: Any, name: str) -> None:
    """Puts added tokens; an old form of the key means special_tokens."""
    if isinstance(value, Mapping):
        _special_tokens(found, value, name)
    else:
        found.put("model.add_tokens", value, name)


def _adapter(found: Translation, value: Any, name: str) -> None:
    if value not in ("lora", "qlora"):
        raise ValueError(f"{value!r} names no kind of adapter")
    found.put("adapter.kind", "lora", name)
    if value == "qlora":
        found.lost.append(f"{name}=qlora: weights in 4 bits; adapter.base_dtype=bf16 halves those of float32")


def _dora(found: Translation, value: Any, name: str) -> None:
    if boolean(value):
        found.drop("adapter.kind")
        found.put("adapter.kind", "dora", name)


def _wandb(found: Translation, value: Any, name: str) -> None:
    found.put("metrics.project", value, name)
    found.put("metrics.trackers", ["wandb"], name)


def _tracker(tracker: str) -> Row:
    def put(found: Translation, value: Any, name: str) -> None:
        if boolean(value):
            found.put("metrics.trackers", [*(found.get("metrics.trackers") or []), tracker], name)

    return Row(put)


_NO_4_BITS = lost("weights are not quantized here")
_SHUFFLED = "samples are always in an order that follows from train.seed"
AXOLOTL: dict[str, Row] = {
    "base_model": Row(folder_of),
    "tokenizer_config": to("data.tokenizer"),
    "datasets": Row(_datasets),
    "test_datasets": Row(_datasets),
    "val_set_size": Row(held_out),
    "chat_template": Row(_template),
    "chat_template_jinja": to("data.chat_template"),
    "chat_template_kwargs": to("data.chat_template_kwargs"),
    "special_tokens": Row(_special_tokens),
    "tokens": Row(_tokens),
    "sequence_len": to("data.seq_length", 512),
    "excess_length_strategy": choice("data.too_long", {"drop": "drop", "truncate": "end", "raise": "refuse"}, "drop"),
    "sample_packing": Row(packing_of("rows")),
    "micro_batch_size": to("train.micro_batch_size", 1),
    "gradient_accumulation_steps": later(number, 1),
    "batch_size": lost("gradient_accumulation_steps says how often a batch is accumulated"),
    "num_epochs": later(number, 1.0),
    "learning_rate": to("optimizer.lr"),
    "lr_scheduler": choice("optimizer.schedule", SCHEDULES, "cosine"),
    "lr_scheduler_kwargs": lost("no key here corresponds"),
    "weight_decay": to("optimizer.weight_decay", 0.0),
    "max_grad_norm": to("optimizer.clip_grad", 1.0),
    "adam_beta1": to("optimizer.beta1", 0.9),
    "adam_beta2": to("optimizer.beta2", 0.999),
    "adam_epsilon": to("optimizer.epsilon", 1e-8),
    "optimizer": Row(optimizer_of, "adamw_torch_fused"),
    "bf16": later(lambda value: value in ("auto", "full") or boolean(value), "auto"),
    **dict.fromkeys("fp16 bfloat16 float16 float32".split(), later(boolean)),
    "seed": to("train.seed", 42),
    "data_seed": to("data.seed"),
    "adapter": Row(_adapter),
    **{name: row for name, row in lora(dropout=0.0).items() if name not in ("lora_rank", "use_rslora")},
    "lora_target_modules": Row(targets),
    "lora_target_linear": Row(
        lambda found, value, name: targets(found, "all-linear", name) if boolean(value) else None
    ),
    "lora_modules_to_save": Row(saved),
    "lora_model_dir": to("adapter.path"),
    "lora_rank_pattern": Row(pattern_of("adapter.rank_pattern")),
    "lora_alpha_pattern": Row(pattern_of("adapter.alpha_pattern")),
    "peft_use_dora": Row(_dora),
    "peft_use_rslora": choice("adapter.scaling", {True: "rslora", False: None}),
    "gradient_checkpointing": Row(recomputed, False),
    "context_parallel_size": to("layout.cp", change=unless_0),
    "sequence_parallel_degree": to("layout.cp", change=unless_0),
    "tensor_parallel_size": to("layout.tp", change=unless_0),
    "expert_parallel_size": to("layout.ep", change=unless_0),
    "output_dir": to("run.dir", "./model-out"),
    "save_total_limit": to("checkpoint.keep_last", 4, lambda value: above_0(value or 4)),
    "evals_per_epoch": lost("valid.interval_steps is a number of steps", 0),
    "saves_per_epoch": lost("checkpoint.interval_steps is a number of steps", 0),
    "save_strategy": lost("checkpoint.interval_steps is a number of steps", "steps"),
    "eval_strategy": lost("valid.interval_steps is a number of steps", "steps"),
    "logging_steps": to("metrics.console_interval_steps", change=unless_0),
    "use_tensorboard": to("metrics.tensorboard"),
    "use_wandb": _tracker("wandb"),
    "wandb_project": Row(_wandb),
    "use_mlflow": _tracker("mlflow"),
    "use_trackio": _tracker("trackio"),
    "wandb_name": to("run.name"),
    "rl": choice("loss.function", {name: name for name in PREFERENCES}),
    "reward_model": Row(reward_model),
    "center_rewards_coefficient": to("loss.options.center_rewards_coefficient", change=number),
    "rl_beta": to("loss.options.beta", change=number),
    "orpo_alpha": to("loss.options.beta", change=number),
    "dpo_label_smoothing": to("loss.options.label_smoothing", change=number),
    "simpo_gamma": to("loss.options.gamma", change=number),
    "dpo_loss_type": lost("the loss of DPO is that of its paper", ["sigmoid"]),
    # 0 means 1 there as well
    "kto_desirable_weight": to("loss.options.desirable_weight", change=lambda value: number(value) or 1.0),
    "kto_undesirable_weight": to("loss.options.undesirable_weight", change=lambda value: number(value) or 1.0),
    "load_in_4bit": _NO_4_BITS,
    "load_in_8bit": _NO_4_BITS,
    "train_on_inputs": lost("prompts are never in the loss of conversations; data.format=text trains whole texts"),
    "roles_to_train": lost("the answers of the assistant are in the loss", ["assistant"]),
    "group_by_length": lost(f"{_SHUFFLED}; packing fills the rows"),
    "shuffle_merged_datasets": lost(_SHUFFLED, True),
    "sample_packing_sequentially": lost(_SHUFFLED),
    "curriculum_sampling": lost(_SHUFFLED),
    "shuffle_before_merging_datasets": UNUSED,
    **dict.fromkeys(
        """
        dp_shard_size dp_replicate_size max_steps cosine_min_lr_ratio warmup_steps warmup_ratio save_steps eval_steps
        cpo_alpha
        """.split(),
        later(number),
    ),
    **dict.fromkeys(
        """
        flash_attention sdp_attention xformers_attention flex_attention eager_attention attn_implementation tf32
        deepspeed fsdp fsdp_config fsdp_version pad_to_sequence_len eval_sample_packing dataset_prepared_path
        dataset_processes dataset_num_proc dataset_keep_in_memory dataloader_pin_memory dataloader_num_workers
        dataloader_prefetch_factor gradient_checkpointing_kwargs activation_offloading auto_resume_from_checkpoints
        resume_from_checkpoint save_safetensors debug wandb_entity wandb_watch wandb_log_model wandb_run_id wandb_mode
        tokenizer_type model_type trust_remote_code plugins local_rank save_first_step hub_model_id hub_strategy
        eval_batch_size strict liger_rope liger_rms_norm liger_glu_activation liger_fused_linear_cross_entropy
        is_llama_derived_model is_mistral_derived_model is_qwen_derived_model is_falcon_derived_model lora_mlp_kernel
        lora_qkv_kernel lora_o_kernel torch_compile torch_compile_backend torch_compile_mode ddp ddp_timeout
        ddp_bucket_cap_mb low_cpu_mem_usage include_tkps save_only_model load_best_model_at_end
        sample_packing_group_size sample_packing_bin_size gc_steps profiler_steps device device_map world_size
        hf_use_auth_token liger_layer_norm liger_rms_norm_gated processor_type skip_prepare_dataset use_kernels
        remove_unused_columns tokenizer_use_fast ddp_find_unused_parameters flash_attn_cross_entropy
        flash_attn_fuse_mlp cut_cross_entropy use_scattermoe use_sonicmoe fused_attn_kernel flex_attn_compile_kwargs
        tiled_mlp experts_implementation
        """.split(),
        UNUSED,
    ),
}


def from_axolotl(path: Path) -> Translation:
    """Translates a file of axolotl.

    Raises:
        ConfigError: The file cannot be read.
    """
    found = Translation("axolotl")
    run = translated(found, read_file(path).content, AXOLOTL)
    put_length(found, run, "max_steps", "num_epochs")
    put_interval(found, run, "save_steps", "checkpoint.interval_steps")
    put_interval(found, run, "eval_steps", "valid.interval_steps")
    for put in (_warmup, _rates, _batch, _precision, _simpo):
        put(found, run)
    drop_adapter_of_full_runs(found, is_adapted=run["adapter"] is not None)
    finish(found, run)
    return found


def _warmup(found: Translation, run: Settings) -> None:
    """Puts the warm-up; axolotl's default is 3 %, at most 100 steps, and one step becomes two."""
    steps, ratio, whole = run["warmup_steps"], run["warmup_ratio"], found.get("train.num_steps")
    names = ("warmup_steps", "warmup_ratio")
    if steps is not None and not 0 < number(steps) < 1:
        count = int(number(steps))
    elif steps is not None:
        found.put("optimizer.warmup_ratio", steps, run.origin(*names))
        return
    elif isinstance(whole, int):
        count = int(0.03 * whole) if ratio is None else int(number(ratio) * whole)
        count = min(count, 100) if ratio is None else count
    else:
        found.put("optimizer.warmup_ratio", 0.03 if ratio is None else ratio, run.origin(*names))
        found.notes.append(
            "a warm-up by share is rounded down there, and up here; without warmup_ratio it has at most 100 steps there"
        )
        return
    found.put("optimizer.warmup_steps", 2 if count == 1 else count, run.origin(*names))


def _rates(found: Translation, run: Settings) -> None:
    """Applies transformers' schedules: a constant rate has no warm-up, and only cosine has a last rate."""
    if run["lr_scheduler"] == "constant":
        found.drop("optimizer.warmup_steps")
        found.drop("optimizer.warmup_ratio")
    if run["lr_scheduler"] == "cosine" and run["cosine_min_lr_ratio"] is not None:
        last_rate(found, run["cosine_min_lr_ratio"], "cosine_min_lr_ratio")


def _batch(found: Translation, run: Settings) -> None:
    sizes = {name: int(number(run[name])) for name in ("dp_shard_size", "dp_replicate_size") if run[name]}
    put_whole_batch(found, run, ("micro_batch_size", "gradient_accumulation_steps", *sizes), is_of_one_rank=not sizes)
    if len(sizes) == 1:
        found.notes.append(
            f"{next(iter(sizes))} is taken for the number of data-parallel ranks; where more are started, "
            "multiply train.global_batch_size"
        )


def _simpo(found: Translation, run: Settings) -> None:
    """Puts TRL's defaults for SimPO, which its CPO trainer computes."""
    if found.get("loss.function") == "simpo":
        found.put("loss.options.beta", 0.1, "axolotl's default of rl_beta")
        put_likelihood(found, run)


def _precision(found: Translation, run: Settings) -> None:
    names = ("bf16", "fp16", "bfloat16", "float16")
    is_16 = is_on(run, "fp16")
    is_brain = not is_16 if run["bf16"] == "auto" else run["bf16"] == "full" or is_on(run, "bf16")
    is_brain |= is_on(run, "bfloat16")
    is_16 |= is_on(run, "float16")
    found.put("train.precision", "bf16" if is_brain else "fp16" if is_16 else "fp32", run.said(*names))
    if is_brain and run["adapter"] is None:
        found.notes.append(
            "weights are held in bfloat16 there, unless FSDP keeps float32 ones; here main weights are float32"
        )
