"""Translation of the arguments of transformers' Trainer, which TRL and LLaMA-Factory share.

Source: transformers 5.24.0, TrainingArguments and optimization.py; accelerate 1.15.0, commands/config.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.base.spelling import counted
from mtrain.config.foreign.reading import json_or_yaml
from mtrain.config.foreign.sharding import CHECKS, put_sharding
from mtrain.config.foreign.trainers import (
    COMMON,
    SCHEDULES,
    is_on,
    last_rate,
    put_interval,
    put_length,
    put_warmup,
    put_whole_batch,
)
from mtrain.config.foreign.translation import Settings, Translation
from mtrain.config.foreign.values import is_same, mapping, number
from mtrain.config.tables import table

_ACCUMULATED = ("per_device_train_batch_size", "gradient_accumulation_steps")


_OF_ACCELERATOR = {"split_batches": False, "even_batches": True, "non_blocking": False, "use_seedable_sampler": True}
"""Key of accelerator_config -> default; all others are null."""


def _accelerator(config: Translation, value: Any, name: str) -> None:
    changed = {key: each for key, each in mapping(value).items() if each != _OF_ACCELERATOR.get(key)}
    if changed:
        config.lost.append(f"{name}={changed}: train.global_batch_size is the whole batch, however ranks share it")


FUNCTIONS: dict[str, Callable[..., Any]] = {**COMMON, **CHECKS, "mapping": mapping, "accelerator": _accelerator}
TRAINER: Mapping[str, Any] = table("transformers")
"""Table of the Trainer's arguments."""


def put_trainer(config: Translation, run: Settings) -> None:
    """Sets length, batch, schedule, precision and intervals from the arguments of the Trainer."""
    put_length(config, run, "max_steps", "num_train_epochs")
    is_known = run["num_processes"] is not None
    put_whole_batch(config, run, (*_ACCUMULATED, *(["num_processes"] if is_known else ())), is_of_one_rank=not is_known)
    put_warmup(config, run, "warmup_steps", "warmup_ratio", rounds_up=True)
    put_schedule(config, run)
    _precision(config, run)
    _checkpoints(config, run)
    _validation(config, run)
    put_interval(config, run, "logging_steps", "metrics.console_interval_steps")
    if (share := number(run["label_smoothing_factor"] or 0)) and config.get("loss.function") in (None, "next_token"):
        config.put("loss.function", "next_token", "label_smoothing_factor")
        config.put("loss.options.label_smoothing", share, "label_smoothing_factor")
    if not config.get("metrics.trackers"):
        config.drop("metrics.project")


def put_schedule(config: Translation, run: Settings, setting: str = "lr_scheduler_type") -> None:
    """Sets the schedule that `setting` names; transformers' constant rate has no warm-up."""
    name, options = str(run[setting]), dict(mapping(run["lr_scheduler_kwargs"] or {}))
    origin = run.described(setting)
    if name == "constant":
        config.drop("optimizer.warmup_steps")
        config.drop("optimizer.warmup_ratio")
    if name in SCHEDULES:
        config.put("optimizer.schedule", SCHEDULES[name], origin)
    elif name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "polynomial"):
        config.put("optimizer.schedule", "linear" if name == "polynomial" else "cosine", origin)
        _last_rate(config, options, name)
    elif name == "warmup_stable_decay" and isinstance(options.get("num_decay_steps"), int):
        config.put("optimizer.schedule", "wsd", origin)
        config.put("optimizer.decay_steps", options.pop("num_decay_steps"), "lr_scheduler_kwargs: num_decay_steps")
        if (share := options.pop("min_lr_ratio", None)) is not None:
            last_rate(config, share, "lr_scheduler_kwargs: min_lr_ratio")
        if options.pop("decay_type", "cosine") != "linear":
            config.lost.append("lr_scheduler_kwargs: decay_type=cosine: the decay of wsd is linear here")
    else:
        config.lost.append(
            f"{origin}: optimizer.schedule takes constant, linear, cosine and wsd; cosine with min_lr is the nearest"
        )
    for option, value in options.items():
        config.lost.append(f"lr_scheduler_kwargs: {option}={value}: no key here corresponds")


def _last_rate(config: Translation, options: dict[str, Any], name: str) -> None:
    if name == "polynomial":
        config.put("optimizer.min_lr", options.pop("lr_end", 1e-7), "lr_scheduler_kwargs: lr_end")
        if (power := options.pop("power", 1.0)) != 1:
            config.lost.append(f"lr_scheduler_kwargs: power={power}: the decay is linear here, a power of 1")
        return
    share, rate = options.pop("min_lr_rate", None), options.pop("min_lr", None)
    if share is not None:
        last_rate(config, share, "lr_scheduler_kwargs: min_lr_rate")
    elif rate is not None:
        config.put("optimizer.min_lr", rate, "lr_scheduler_kwargs: min_lr")


def _precision(config: Translation, run: Settings) -> None:
    """Sets the precision from that of autocast, which keeps the weights as they were loaded."""
    is_16 = is_on(run, "fp16")
    is_brain = not is_16 if run["bf16"] is None else is_on(run, "bf16")
    kind = "bf16" if is_brain else "fp16" if is_16 else "fp32"
    config.put("train.precision", kind, run.described("bf16", "fp16"))


def _checkpoints(config: Translation, run: Settings) -> None:
    strategy = str(run["save_strategy"])
    if strategy in ("no", "False"):
        config.put("checkpoint.interval_steps", 0, run.described("save_strategy"))
    elif strategy == "steps":
        put_interval(config, run, "save_steps", "checkpoint.interval_steps")
    else:
        config.lost.append(f"save_strategy={strategy}: checkpoint.interval_steps is a number of steps")
    interval = config.get("checkpoint.interval_steps")
    if interval and config.get("checkpoint.keep_last") is None:
        config.put(
            "checkpoint.keep_every_steps", interval, f"{config.program}'s default of save_total_limit, which keeps all"
        )


def _validation(config: Translation, run: Settings) -> None:
    """Sets the interval of validation; its default is the interval of the log."""
    name = "evaluation_strategy" if run["evaluation_strategy"] is not None else "eval_strategy"
    strategy = str(run[name])
    if strategy == "steps":
        put_interval(config, run, "eval_steps" if run["eval_steps"] is not None else "logging_steps", _INTERVAL)
        config.origins[_INTERVAL] = f"{config.origins.get(_INTERVAL, '')}; {run.described(name)}".strip("; ")
        if config.get(_INTERVAL) is None:
            config.origins.pop(_INTERVAL)
    elif strategy == "epoch":
        config.lost.append(f"{name}={strategy}: {_INTERVAL} is a number of steps")
    else:
        config.drop("valid")  # what is held out is not trained on either way


_INTERVAL = "valid.interval_steps"


def accelerate_settings(config: Translation, content: Mapping[str, Any]) -> dict[str, Any]:
    """Translates accelerate's configuration file to settings of the Trainer, and reports its other keys.

    Args:
        config: Collects the report.
        content: Keys of the file, or arguments of `accelerate launch`.
    """
    settings: dict[str, Any] = {}
    precision = content.get("mixed_precision")
    if precision in ("bf16", "fp16"):
        settings[precision] = True
    elif precision == "fp8":
        config.lost.append("mixed_precision=fp8: train.fp8 and train.fp8_recipe say how")
    zero = content.get("deepspeed_config") or {}
    if path := zero.get("deepspeed_config_file"):
        settings["deepspeed"] = path
    elif zero or "zero_stage" in content:
        zero = {**content, **zero}
        moved = {
            name: {"device": zero.get(f"{name}_device", "none")} for name in ("offload_optimizer", "offload_param")
        }
        settings["deepspeed"] = {"zero_optimization": {"stage": zero.get("zero_stage", 2), **moved}}
    options = content.get("fsdp_config") or {name: value for name, value in content.items() if name.startswith("fsdp_")}
    if options or content.get("distributed_type") == "FSDP":
        settings |= {"fsdp": True, "fsdp_config": options}
    if (ranks := _parallelism(config, content)) > 0:
        settings["num_processes"] = ranks
    if content.get("megatron_lm_config"):
        config.lost.append("megatron_lm_config: the layout is layout.tp, layout.pp and layout.sp")
    _report_accelerate(config, content, zero)
    return settings


def _parallelism(config: Translation, content: Mapping[str, Any]) -> int:
    """Sets the layout of accelerate's parallelism_config; returns the number of data-parallel ranks, 0 if unknown."""
    given = {**content, **(content.get("parallelism_config") or {})}
    kinds = ("tp", "cp", "sp", "dp_replicate", "dp_shard")
    values = {kind: given.get(f"parallelism_config_{kind}_size") for kind in kinds}
    size = {kind: 1 if value is None else int(number(value)) for kind, value in values.items()}
    for kind, key in (("tp", "layout.tp"), ("cp", "layout.cp"), ("sp", "layout.cp")):
        name = f"parallelism_config_{kind}_size"
        if size[kind] > 1:
            config.put(key, size[kind], name)
            config.put("layout.cp_comm", "ulysses" if kind == "sp" else None, name)
    copies, parts = size["dp_replicate"], size["dp_shard"]
    if copies > 1 and parts > 1:
        config.notes.append(
            f"parallelism_config_dp_replicate_size={copies}, parallelism_config_dp_shard_size={parts}: layout.shard "
            "divides over all data-parallel ranks, without copies"
        )
    processes, together = int(number(given.get("num_processes") or -1)), size["tp"] * size["cp"] * size["sp"]
    if processes <= 0:
        return copies * parts if copies * parts > 1 else 0
    if processes % together:
        raise ConfigError(
            f"num_processes={processes} is not a multiple of the {counted(together, 'rank')} of parallelism_config "
            "that share a row; fix one of them"
        )
    if together > 1:
        config.notes.append(f"num_processes={processes} is {counted(processes // together, 'data-parallel rank')}")
    return processes // together


def _report_accelerate(config: Translation, content: Mapping[str, Any], zero: Mapping[str, Any]) -> None:
    """Reports keys of accelerate that are not read."""
    config.lost += [
        f"deepspeed_config: {name}={zero[name]}: the arguments of the Trainer are translated"
        for name in ("gradient_accumulation_steps", "gradient_clipping")
        if zero.get(name) not in (None, "auto")
    ]
    config.without_effect += [
        name for name in content if name not in _READ_OF_ACCELERATE and not name.startswith("fsdp_")
    ]
    config.without_effect += [
        f"{section}.{name}"
        for section in ("deepspeed_config", "fsdp_config", "parallelism_config")
        for name in content.get(section) or {}
        if not name.endswith(_READ_IN_SECTIONS)
    ]


_READ_IN_SECTIONS = (
    *("stage", "_device", "_file", "gradient_accumulation_steps", "gradient_clipping", "_size"),
    *("sharding_strategy", "reshard_after_forward", "offload_params", "activation_checkpointing"),
)
"""Ends of the keys of accelerate's sections that are read."""
_READ_OF_ACCELERATE = frozenset(
    ("mixed_precision", "num_processes", "deepspeed_config", "zero_stage", "fsdp_config", "parallelism_config")
) | {"megatron_lm_config"}


def put_parallelism(config: Translation, run: Settings) -> None:
    """Sets `layout.shard` and the offloading to the CPU."""
    put_sharding(config, run)
    zero, fsdp = run["deepspeed"], run["fsdp_config"]
    content = _of_deepspeed(zero)
    stage = content.get("zero_optimization") or {}
    moved = [name for name in ("offload_optimizer", "offload_param") if _device(stage.get(name)) != "none"]
    if moved == ["offload_optimizer"] and config.get("layout.shard") != "weights":
        config.put("train.offload_optimizer", True, "deepspeed: offload_optimizer")
    elif moved:
        config.lost.append(
            f"deepspeed: {', '.join(moved)}: weights stay on the GPU; with layout.shard=optimizer, "
            "train.offload_optimizer moves the optimizer's state"
        )
    for section in ("optimizer", "scheduler"):
        if section in content:
            config.lost.append(f"deepspeed: {section}: the arguments of the Trainer are translated; see optimizer")
    options = fsdp if isinstance(fsdp, Mapping) else {}
    is_moved = is_same(options.get("fsdp_offload_params", options.get("offload_params", False)), True)
    if is_moved or "offload" in str(run["fsdp"]).split():
        config.lost.append("fsdp: offload: weights stay on the GPU; layout.tp and layout.pp divide them further")


def _of_deepspeed(value: Any) -> Mapping[str, Any]:
    """Returns DeepSpeed's configuration from a mapping, JSON text or a file; empty if the file is missing."""
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        return json_or_yaml(Path(value))
    return {} if value is None else mapping(value)


def _device(section: Any) -> str:
    return str(section.get("device", "none")) if isinstance(section, Mapping) else "none"
