"""Translation of Megatron-Bridge: names of recipes, YAML overrides of its ConfigContainer, and arguments `a.b=c`.

Source: Megatron-Bridge 0.3.1, training/config.py, recipes, peft; megatron-core 0.16.1, optimizer_param_scheduler.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.base.spelling import meant
from mtrain.config.foreign.images import Part, Parts, put_images
from mtrain.config.foreign.reading import Form, comma_list, read_settings, without_unknown
from mtrain.config.foreign.sharding import put_shard
from mtrain.config.foreign.trainers import (
    COMMON,
    SCHEDULES,
    drop_adapter_of_full_runs,
    finish,
    is_on,
    put_architecture,
    put_warmup,
    targets,
)
from mtrain.config.foreign.translation import Put, Row, Settings, Translation, above_0, rows_of, to, translated
from mtrain.config.foreign.values import listed, number, shares
from mtrain.config.megatron_fields import EXPERTS, OURS, PROVEN, REFUSED, TYPED_KNOBS, is_default
from mtrain.config.tables import table

_TABLE = table("megatron_bridge")
_RECIPE = re.compile(r"\w+_(?:pretrain|sft|peft|finetune)(?:_\w*config)?")
_FP8 = {
    "current_scaling": ("hybrid", "tensorwise"),
    "subchannel_scaling": ("hybrid", "blockwise"),
    "mxfp8": ("e4m3", "mxfp8"),
}
"""Part of the name of a mixed precision -> train.fp8, train.fp8_recipe."""
_TARGETS = {"linear_qkv": "qkv", "linear_proj": "proj", "linear_fc1": "fc1", "linear_fc2": "fc2"}


def _minutes(config: Translation, value: Any, name: str) -> None:
    config.put("train.process_group_timeout_s", 60 * number(value), name)


def _split(config: Translation, value: Any, name: str) -> None:
    config.put("data.split", shares(value) if isinstance(value, str) else value, f"{name}, by documents in file order")


def _save_interval(config: Translation, value: Any, name: str) -> None:
    config.put("checkpoint.interval_steps", value, name)


def _tracker(tracker: str) -> Put:
    def put(config: Translation, value: Any, name: str) -> None:
        config.put("metrics.trackers", [*(config.get("metrics.trackers") or []), tracker], name)
        config.put("metrics.project", value, name)

    return put


def _targets(config: Translation, value: Any, name: str) -> None:
    targets(config, [_TARGETS.get(module, module) for module in comma_list(value)], name)


def _balance(config: Translation, value: Any, name: str) -> None:
    if number(value):
        config.lost.append(f"{name}={value}: loss.router.sequence_balance_coefficient is the same under every layout")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **COMMON,
    "minutes": _minutes,
    "split": _split,
    "save_interval": _save_interval,
    "tracker": _tracker,
    "targets_of_megatron": _targets,
    "balance": _balance,
    "any": lambda value: value,
}
_ACTIVATIONS = {
    ("silu", True): "swiglu",
    ("gelu", False): "gelu",
    ("fast_gelu", False): "gelu_tanh",
    ("fast_gelu", True): "geglu_tanh",
    ("squared_relu", False): "relu2",
}
"""Activation function and whether it is gated -> model.activation."""


def _lost_field(field: str, why: str) -> Row:
    """Returns the row of a field of megatron-core's TransformerConfig without equivalent; reports other values than the
    default."""

    def put(config: Translation, value: Any, name: str) -> None:
        if not is_default(field, value):
            config.lost.append(f"{name}={value}: {why}")

    return Row(put)


_WHY = {**{name: f"it is {key} here" for name, key in TYPED_KNOBS.items()}, **OURS, **EXPERTS, **REFUSED}
MEGATRON_BRIDGE = {
    **{f"model.{name}": _lost_field(name, why) for name, why in _WHY.items()},
    **{f"model.{name}": to(f"model.megatron.{name}") for name in PROVEN},
    **rows_of(_TABLE, _FUNCTIONS),
}
"""Dotted key of the ConfigContainer -> treatment."""
_WHOLE = ("dataset.dataset_kwargs", "dataset.source", "model.kd_config", "model.teacher", "logger.mlflow_tags")


def from_megatron_bridge(words: Sequence[str]) -> Translation:
    """Translates a recipe, files of overrides and arguments `section.key=value`, in this order.

    Args:
        words: Name of a recipe, alone or after --recipe; YAML files; arguments. A launcher is skipped.

    Raises:
        ConfigError: A file cannot be read, nothing is given, or the recipe is unknown.
    """
    config = Translation("Megatron-Bridge")
    named = [word for word in words if _RECIPE.fullmatch(word)]
    options = [f"recipe={word}" for word in named if _before(words, word) != "--recipe"]
    words = [word for word in words if word not in named or _before(words, word) == "--recipe"]
    form = Form(MEGATRON_BRIDGE, (), ("config_file", "config"), _WHOLE)
    given = read_settings(config, [*options, *words], form)
    settings = _of_container(config, without_unknown(config, given.settings))
    recipe = str(settings.pop("recipe", "")).removesuffix("_config")
    rows = _rows(config, recipe, settings)
    run = translated(config, settings, rows)
    kind = _TABLE["recipes"][recipe]["kind"] if recipe else _kind_of(run)
    for put in (_precision, _schedule, _layout, _paths):
        put(config, run)
    _model(config, run, recipe, kind)
    _function(config, run)
    _adapter(config, run)
    _images(config, run)
    if kind == "pretrain":
        _documents(config, run)
        config.report_unmentioned(run.explicit)
    else:
        _records(config, run)
        finish(config, run)
    config.given = (*(("recipe",) if recipe else ()), *config.given)
    return config


def _of_container(config: Translation, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of a whole ConfigContainer, as a run saves it: names of objects in place of their parts."""
    plain = dict(settings)
    for name in settings:
        parent, _, last = name.rpartition(".")
        if last in ("_call_", "_args_", "_partial_"):
            plain.pop(name)
        elif last == "_target_" and (f"{parent}._call_" in settings or f"{parent}._args_" in settings):
            plain[parent] = plain.pop(name)
        elif last == "_target_" and name not in MEGATRON_BRIDGE:
            config.without_effect.append(name)
            plain.pop(name)
    return plain


def _before(words: Sequence[str], word: str) -> str:
    place = list(words).index(word)
    return words[place - 1] if place else ""


def _rows(config: Translation, recipe: str, settings: Mapping[str, Any]) -> dict[str, Row]:
    """Returns the rows with the recipe's defaults, and rows for sections without effect."""
    rows = dict(MEGATRON_BRIDGE)
    for name in settings:
        if name not in rows and name.partition(".")[0] in _TABLE["unused_sections"].split():
            rows[name] = rows["_target_"]
    if not recipe:
        defaults = {"mixed_precision": "bf16_mixed"}
        config.notes.append(
            "no recipe is named, so defaults are those of Megatron-Bridge's classes, in bf16 as in all recipes; write "
            "the name of yours before the file"
        )
    else:
        is_given = any(name.startswith("peft.") for name in settings)
        defaults = _of_recipe(recipe, str(settings["peft"]) if "peft" in settings else "lora" if is_given else None)
        config.notes.append(f"defaults are those of the recipe {recipe}_config, Megatron-Bridge 0.3.1")
    for name, value in defaults.items():
        is_null = name in settings and settings[name] is None
        rows[name] = Row(rows[name].put, None if is_null else value)
    return rows


def _of_recipe(recipe: str, peft: str | None) -> dict[str, Any]:
    """Returns the values that a recipe sets, by dotted key.

    Args:
        peft: Kind of adapters or none, on which some values depend; None: as the recipe says.
    """
    if recipe not in _TABLE["recipes"]:
        of_kinds = [recipe.replace("_finetune", kind) for kind in ("_sft", "_peft")]
        later = [name for name in of_kinds if name in _TABLE["recipes"]]
        near = " or ".join(later) or meant(recipe, _TABLE["recipes"])
        raise ConfigError(
            f"{recipe}: this recipe of Megatron-Bridge is not known here; "
            + (f"did you mean {near}?" if near else "write its values into a file that overrides the ConfigContainer")
        )
    known = {**_TABLE["recipes"][recipe]}
    kinds, kind, hf = _TABLE["kinds"], known.pop("kind"), known.pop("hf")
    adapted = known.pop("adapted", {})
    known |= {} if str(known.get("peft") if peft is None else peft).lower() == "none" else adapted
    defaults = {**kinds["all"], **(kinds["sft"] if kind == "peft" else {}), **kinds[kind]}
    return {
        **defaults,
        **{_TABLE["short"][short]: value for short, value in known.items()},
        "tokenizer.tokenizer_model": hf,
    }


def _kind_of(run: Settings) -> str:
    if run["dataset._target_"] is not None:
        return "pretrain" if "GPTDataset" in str(run["dataset._target_"]) else "sft"
    is_finetuned = run["peft"] or run["dataset.dataset_root"] or run["dataset.dataset_name"]
    return "sft" if is_finetuned or any(name.startswith("peft.") for name in run.explicit) else "pretrain"


def _precision(config: Translation, run: Settings) -> None:
    name, given = "mixed_precision", run["mixed_precision"]
    text = "" if given is None else str(given).replace("-", "_")
    kinds = {f"mixed_precision.{kind}": kind for kind in ("bf16", "fp16", "fp32")}
    on = [key for key in kinds if is_on(run, key)]
    kind = kinds[on[0]] if on else "fp16" if text.startswith(("fp16", "16")) else "bf16" if text else "fp32"
    config.put("train.precision", kind, run.described(*(on or [name])))
    recipe = next((formats for part, formats in _FP8.items() if part in text), None)
    for key, usual in (("model.fp8", "delayed"), ("mixed_precision.fp8", "tensorwise")):
        if run[key] is not None:
            name, recipe = key, (str(run[key]), str(run[f"{key}_recipe"] or usual))
    if "delayed_scaling" in text or (recipe is not None and recipe[1] == "delayed"):
        config.lost.append(f"{run.described(name)}: checkpoints here do not contain the scales of delayed scaling")
    elif "nvfp4" in text:
        config.lost.append(f"{run.described(name)}: train.fp8 is the narrowest format")
    elif recipe is not None:
        config.put("train.fp8", recipe[0], run.described(name))
        config.put("train.fp8_recipe", recipe[1], run.described(name))


def _schedule(config: Translation, run: Settings) -> None:
    style = str(run["scheduler.lr_decay_style"])
    if style in SCHEDULES:
        config.put("optimizer.schedule", SCHEDULES[style], run.described("scheduler.lr_decay_style"))
    else:
        config.lost.append(
            f"{run.described('scheduler.lr_decay_style')}: optimizer.schedule takes cosine, linear, constant, wsd"
        )
    if style == "WSD":
        config.drop("optimizer.decay_steps")
        config.put(
            "optimizer.decay_steps", run["scheduler.lr_wsd_decay_iters"], run.origin("scheduler.lr_wsd_decay_iters")
        )
        if run["scheduler.lr_wsd_decay_style"] != "linear":
            config.lost.append(f"{run.described('scheduler.lr_wsd_decay_style')}: wsd falls linearly here")
    put_warmup(config, run, "scheduler.lr_warmup_iters", "scheduler.lr_warmup_fraction", rounds_up=True)
    if (decay := run["scheduler.start_weight_decay"]) is not None and decay != run["optimizer.weight_decay"]:
        config.drop("optimizer.weight_decay")
        config.put("optimizer.weight_decay", decay, run.origin("scheduler.start_weight_decay"))
        config.notes.append(
            f"scheduler.start_weight_decay={decay} is the weight decay in every step there, whatever "
            f"{run.described('optimizer.weight_decay')} says"
        )
    if (rate := run["optimizer.finetune_lr"]) is not None:
        config.drop("optimizer.lr")
        config.put("optimizer.lr", rate, "optimizer.finetune_lr")
    if (samples := run["train.train_samples"]) is not None:
        size = config.get("train.global_batch_size")
        if size:
            config.put(
                "train.num_steps", -(-int(number(samples)) // size), "train.train_samples / train.global_batch_size"
            )
        else:
            config.lost.append(
                f"train.train_samples={samples}: train.num_steps counts steps of train.global_batch_size"
            )
    if not is_on(run, "model.calculate_per_token_loss"):
        config.notes.append(
            "Megatron-Bridge averages the means of microbatches and data-parallel ranks unless "
            "model.calculate_per_token_loss is on; loss.aggregation=token-mean is the mean over all tokens"
        )


def _layout(config: Translation, run: Settings) -> None:
    for degree, key in (("layout.tp", "layout.sp"), ("layout.cp", "layout.cp_comm")):
        if config.get(degree) in (None, 1):
            config.drop(key)
    switches = [
        name for name in ("ddp.use_megatron_fsdp", "dist.use_megatron_fsdp", "dist.use_torch_fsdp2") if is_on(run, name)
    ]
    if switches:
        strategy = "ddp.data_parallel_sharding_strategy"
        is_whole = run[strategy] == "optim_grads_params" or switches[-1] == "dist.use_torch_fsdp2"
        put_shard(config, run.origin(*switches, strategy), is_whole=is_whole)
        if is_whole:
            config.drop("train.distributed_optimizer")
    if config.get("train.recompute") == "full" and run["model.recompute_method"] == "block":
        config.put(
            "train.recompute_layers", run["model.recompute_num_layers"], run.origin("model.recompute_num_layers")
        )
    if config.get("train.recompute") != "selective":
        config.drop("train.recompute_modules")
    names = ("model.seq_length", "dataset.seq_length", "dataset.sequence_length")
    name = next((name for name in reversed(names) if name in run.explicit), names[0])
    config.put("data.seq_length", run[name], run.origin(name))
    if is_on(run, "profiling.use_nsys_profiler") or is_on(run, "profiling.use_pytorch_profiler"):
        steps = ("profiling.profile_step_start", "profiling.profile_step_end")
        config.put("metrics.profile_steps", [int(number(run[step])) for step in steps], run.origin(*steps))
    else:
        config.drop("metrics.profile_ranks")


def _paths(config: Translation, run: Settings) -> None:
    interval, folder, origin = config.get("checkpoint.interval_steps"), run["checkpoint.load"], run["checkpoint.save"]
    if interval and config.get("checkpoint.keep_last") is None:
        config.put(
            "checkpoint.keep_every_steps",
            interval,
            "Megatron-Bridge's default of checkpoint.most_recent_k, which keeps all",
        )
    if folder is not None and origin is not None and folder != origin:
        config.lost.append(f"{run.described('checkpoint.load')}: a run resumes from its own folder, run.dir")
    config.put("metrics.tensorboard", run["logger.tensorboard_dir"] is not None, run.origin("logger.tensorboard_dir"))
    name = "validation.eval_iters" if run["validation.eval_iters"] is not None else "train.eval_iters"
    count, size = number(100 if run[name] is None else run[name]), config.get("train.global_batch_size")
    if count == 0:
        config.drop("valid")
    elif size:
        config.put("valid.max_samples", int(count) * size, f"{run.origin(name)} x train.global_batch_size")


def _model(config: Translation, run: Settings, recipe: str, kind: str) -> None:
    """Sets the model: pretraining begins with random weights, finetuning with those of Hugging Face's folder."""
    start = run["checkpoint.pretrained_checkpoint"]
    hf = _TABLE["recipes"][recipe]["hf"] if recipe else None
    known = _TABLE["models"].get(hf)
    if start is not None and (known is not None or not recipe):
        config.put("checkpoint.initialize_from", start, "checkpoint.pretrained_checkpoint")
    elif start is not None:
        config.lost.append(
            f"checkpoint.pretrained_checkpoint={start}: model.hf gives the weights; to start from this checkpoint, "
            "replace model.hf with the model's keys, and set checkpoint.initialize_from"
        )
    if known is not None and (kind == "pretrain" or start is not None):
        put_architecture(config, known, f"recipe, {hf}")
    elif recipe and kind != "pretrain":
        config.put("model.hf", hf, f"recipe; a folder: hf download {hf} --local-dir DIR")
    elif recipe:
        config.lost.append(
            f"recipe: the sizes of {hf} are not known here; `mtrain init` copies configurations of models"
        )


def _function(config: Translation, run: Settings) -> None:
    """Sets activation, rope and experts, each from several fields."""
    gated, activation = run["model.gated_linear_unit"], run["model.activation_func"]
    if gated is not None or activation is not None:
        key = (str(activation).rpartition(".")[2], is_on(run, "model.gated_linear_unit"))
        origin = run.described("model.activation_func", "model.gated_linear_unit")
        if key in _ACTIVATIONS:
            config.put("model.activation", _ACTIVATIONS[key], origin)
        else:
            config.lost.append(f"{origin}: model.activation is one of {', '.join(_ACTIVATIONS.values())}")
    if is_on(run, "model.rope_scaling"):
        config.put("model.rope.scaling", "llama3", "model.rope_scaling")
        config.put(
            "model.rope.factor", number(run["model.rope_scaling_factor"]), run.origin("model.rope_scaling_factor")
        )
    if "model.num_layers" in run.explicit and run["model.num_moe_experts"] is None:
        config.drop("model.experts")


def _adapter(config: Translation, run: Settings) -> None:
    scheme = str(run["peft"] or run["peft._target_"] or "").rpartition(".")[2].lower()
    explicit = [name for name in run.explicit if name.startswith("peft")]
    if scheme == "none" or not (scheme or explicit):
        drop_adapter_of_full_runs(config, is_adapted=False)
        return
    kind = "dora" if scheme == "dora" else "lora"
    if scheme not in ("", "lora", "dora"):
        config.lost.append(f"peft={scheme}: adapters are lora and dora")
    origin = run.origin("peft") if run["peft"] else ", ".join(explicit)
    config.put("adapter.kind", kind, origin)
    for key, value in (("adapter.rank", 32), ("adapter.alpha", 64 if kind == "dora" else 32)):
        config.put(key, value, f"Megatron-Bridge's default of peft.{'dim' if key.endswith('rank') else 'alpha'}")
    if config.get("adapter.targets") is None:
        config.put("adapter.targets", list(_TARGETS.values()), "Megatron-Bridge's default of peft.target_modules")


_FREEZES = tuple(f"model.freeze_{part}" for part in ("vision_model", "vision_projection", "language_model"))


def _images(config: Translation, run: Settings) -> None:
    """Sets what is trained of a model that reads images; adapters are trained whatever is frozen."""
    tower, projector, language = (Part(is_on(run, name), run.described(name)) for name in _FREEZES)
    if config.get("adapter.kind") is not None:
        language = language._replace(is_frozen=False)
    put_images(config, run, Parts(tower, projector, language), _FREEZES)


def _documents(config: Translation, run: Settings) -> None:
    """Sets the corpora in Megatron's format; without any, mock data."""
    name = next((name for name in ("dataset.blend", "dataset.data_path") if run[name] is not None), None)
    if run["dataset.blend_per_split"] is not None:
        config.lost.append("dataset.blend_per_split: name the corpora in data.train, data.valid and data.test")
    if name is None or is_on(run, "dataset.mock"):
        config.put("data.kind", "mock", "Megatron-Bridge's default of dataset.blend, which makes up data")
        config.drop("data.split")
        config.drop("valid")
        return
    paths, weights = run[name], None
    if name == "dataset.blend" and len(paths) == 2 and isinstance(paths[0], list):
        paths, weights = paths
    sources: list[dict[str, Any]] = [
        {"path": str(path)} for path in (comma_list(paths) if isinstance(paths, str) else paths)
    ]
    for source, weight in zip(sources, weights or []):
        source["weight"] = float(weight)
    config.put("data.train", sources, f"{name}; prefixes of .bin and .idx")
    if not config.get("data.split"):
        config.drop("valid")
    if is_on(run, "dataset.reset_position_ids") and is_on(run, "dataset.reset_attention_mask"):
        config.put("data.isolate_documents", True, "dataset.reset_position_ids, dataset.reset_attention_mask")


def _records(config: Translation, run: Settings) -> None:
    root, name = run["dataset.dataset_root"], run["dataset.dataset_name"]
    if root is not None:
        origin = f"{run.origin('dataset.dataset_root')}; training.jsonl and validation.jsonl"
        for key, file in (("data.train", "training.jsonl"), ("data.valid", "validation.jsonl")):
            config.put(key, [{"path": str(PurePosixPath(str(root), file))}], origin)
        config.put(
            "data.columns",
            {"input": "prompt", "output": "response"},
            "Megatron-Bridge's default of dataset.dataset_kwargs",
        )
    elif run["dataset.train_data_path"] is not None:
        for key, file in (("data.train", "dataset.train_data_path"), ("data.valid", "dataset.valid_data_path")):
            if run[file] is not None:
                config.put(key, [{"path": path} for path in listed(run[file])], f"{file}; paths on this machine")
    elif name is not None:
        config.put(
            "data.train", [{"path": name}], f"{run.origin('dataset.dataset_name')}; records with prompt and response"
        )
        if (share := run["dataset.val_proportion"]) is not None and number(share):
            config.put("data.split", [1 - number(share), number(share), 0.0], run.origin("dataset.val_proportion"))
    config.put("data.seed", run["dataset.seed"], run.origin("dataset.seed"))
    names = [f"dataset.{specs}_specs.packed_sequence_size" for specs in ("packed_sequence", "offline_packing")]
    packed = names[1] if run[names[1]] is not None else names[0]
    if is_on(run, "dataset.enable_offline_packing"):
        config.put("data.packing", {"batch": "rows"}, "dataset.enable_offline_packing")
    elif run[packed] is not None and above_0(number(run[packed])):
        config.put("data.packing", {"batch": "rows"}, run.origin(packed))
