"""Translation of ms-swift's arguments: sft, pt and rlhf of `megatron` and `swift`.

Source: ms-swift 4.6.0, swift/megatron/arguments, swift/arguments and swift/trainers/arguments.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.hf_trainer import put_schedule
from mtrain.config.foreign.images import PIXELS_PER_TOKEN, Part, Parts, is_qwen3, put_images
from mtrain.config.foreign.objectives import (
    LOSSES_OF_PAIRS,
    PREFERENCES,
    objective_of,
    put_likelihood,
    put_loss_of_pairs,
    reward_model,
)
from mtrain.config.foreign.reading import after_launcher, environment, is_variable, options, read_of
from mtrain.config.foreign.sharding import CHECKS, put_shard, put_sharding
from mtrain.config.foreign.trainers import (
    BALANCE,
    COMMON,
    drop_adapter_of_full_runs,
    finish,
    is_on,
    permit_layout_dependent,
    put_best,
    put_interval,
    put_length,
    put_project,
    put_warmup,
    put_whole_batch,
)
from mtrain.config.foreign.translation import Row, Settings, Translation, lost, rows_of, translated
from mtrain.config.foreign.values import listed, mapping, number, scalar
from mtrain.config.tables import table


def _adapter(config: Translation, value: Any, name: str) -> None:
    if value in ("lora", "dora", _LORA_LLM):
        config.put("adapter.kind", "lora" if value == _LORA_LLM else value, name)
    elif value != "full":
        config.lost.append(f"{name}={value}: adapters are lora and dora")


_LORA_LLM = "lora_llm"
"""Tuner that trains the tower and the projector in full, and all linear layers of the language model by LoRA."""


def _preference(config: Translation, value: Any, name: str) -> None:
    if value == "rm":
        reward_model(config, True, f"{name}=rm")
    else:
        objective_of(PREFERENCES)(config, value, name)


def _columns(config: Translation, value: Any, name: str) -> None:
    columns = scalar(value) if isinstance(value, str) else value
    ours = {"query": "prompt", "response": "response", "messages": "messages", "tools": "tools", "images": "images"}
    if unknown := [str(column) for column in columns.values() if column not in ours]:
        config.lost.append(f"{name}={columns}: {', '.join(unknown)} is not a key of a record here; see data.columns")
    config.put("data.columns", {key: ours[column] for key, column in columns.items() if column in ours} or None, name)


def _tokens(config: Translation, value: Any, name: str) -> None:
    tokens = [token for token in listed(value) if not token.endswith(".txt")]
    if files := [token for token in listed(value) if token.endswith(".txt")]:
        config.lost.append(f"{name}={', '.join(files)}: model.add_special_tokens takes tokens, not a file")
    config.put("model.add_special_tokens", tokens or None, name)


def _start(config: Translation, value: Any, name: str) -> None:
    """Sets the checkpoint to start from, or reports it if a model folder gives the weights."""
    if config.get("model.hf") is None:
        config.put("checkpoint.initialize_from", value, name)
    else:
        config.lost.append(
            f"{name}={value}: model.hf gives the weights; to start from this checkpoint, replace model.hf with the "
            "model's keys, and set checkpoint.initialize_from"
        )


def _dtype(value: Any) -> None:
    if value not in ("bfloat16", "float16", "float32", "auto"):
        raise ValueError(f"{value!r} is not a dtype")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **COMMON,
    **CHECKS,
    "adapter": _adapter,
    "preference": _preference,
    "columns": _columns,
    "tokens": _tokens,
    "start": _start,
    "dtype": _dtype,
    "any": lambda value: value,
    "mapping": mapping,
    "text": str,
    "numbers": lambda value: [number(item) for item in listed(value)],
    "first": lambda value: value[0] if isinstance(value, list) else value,
}
_BY_RECORDS, _OF_MEGATRON, _OF_SWIFT = (
    rows_of(table("ms_swift")[part], _FUNCTIONS) for part in ("records", "megatron", "swift")
)
MEGATRON = {**_BY_RECORDS, **_OF_MEGATRON}
"""Argument of `megatron sft`, `megatron pt` and `megatron rlhf` -> treatment."""
MS_SWIFT = {**_BY_RECORDS, **_OF_SWIFT}
"""Argument of `swift sft`, `swift pt` and `swift rlhf` -> treatment."""


def from_ms_swift(arguments: Sequence[str]) -> Translation:
    """Translates the arguments of `megatron` or `swift` sft, pt and rlhf, from words and files; skips a launcher.

    Raises:
        ConfigError: No arguments are given, or a file of arguments cannot be read.
    """
    config = Translation("ms-swift")
    command, words = after_launcher(arguments, ("sft", "pt", "rlhf"))
    values, before = options(words, lambda name: name.replace("-", "_"))
    arguments_by_name: dict[str, Any] = {}
    for word in before:
        if word.endswith((".yaml", ".yml", ".json")):
            arguments_by_name.update(read_of(Path(word), config.program))
    rows = _rows(command, {*arguments_by_name, *values})
    for name, texts in values.items():
        is_off = name not in rows and name.startswith("no_") and name[3:] in rows and not texts
        if variables := [value for value in texts if is_variable(value)]:
            config.wrong.append(f"--{name} {' '.join(variables)}: this is a shell variable; write its value")
        else:
            value = texts[0] if len(texts) == 1 else texts
            arguments_by_name[name[3:] if is_off else name] = value if texts else not is_off
    arguments_by_name |= _environment(config, command, arguments_by_name, rows)
    arguments_by_name.pop("ENV", None)
    if not arguments_by_name and not config.wrong:
        raise ConfigError("no arguments that begin with -- are given; give the arguments of `megatron sft`")
    run = translated(config, arguments_by_name, rows)
    of_engine = (_of_megatron, _experts, _eight_bits) if "train_iters" in rows else (_of_transformers,)
    for put in (_precision, _head, *of_engine):
        put(config, run)
    is_adapted = any(run[name] not in (None, "full") for name in ("tuner_type", "train_type"))
    is_adapted = is_adapted and run["train_type"] != "full"
    drop_adapter_of_full_runs(config, is_adapted=is_adapted)
    _rate(config, run, "lr" if "lr" in rows else "learning_rate", is_adapted=is_adapted)
    _images(config, run)
    if "rlhf" in command and run["rlhf_type"] is None:
        config.put("loss.function", "dpo", "ms-swift's default of rlhf_type")
    if run["loss_type"] is not None and (loss := config.get("loss.function")) in PREFERENCES:
        put_loss_of_pairs(config, run["loss_type"], "loss_type", LOSSES_OF_PAIRS if loss == "dpo" else {loss: loss})
    if "pt" in command:
        config.put("data.format", "text", "ms-swift's default of pt, which trains texts without a template")
        config.notes.append("pt: a record has a text here, and no messages: rewrite those with one answer")
    _paths(config, run, "megatron_output" if "train_iters" in rows else "output")
    config.notes.append("ms-swift renders conversations with its own templates; here the tokenizer's is used")
    finish(config, run)
    return config


def _rows(command: Sequence[str], names: set[str]) -> dict[str, Row]:
    """Returns the rows of `megatron` or `swift`, judged by the command or by arguments that only one of them has."""
    text = " ".join(command)
    is_megatron = "megatron" in text or ("swift" not in text and not names & (MS_SWIFT.keys() - MEGATRON.keys()))
    rows = dict(MEGATRON if is_megatron else MS_SWIFT)
    if "rlhf" in command:
        rows["loss_scale"] = Row(rows["loss_scale"].put, "last_round")
    if "pt" in command:
        rows["loss_scale"] = lost("a text is in the loss as a whole", "all")
        rows["use_chat_template"] = lost("data.format=text trains texts without a template", False)
    return rows


def _environment(
    config: Translation, command: Sequence[str], arguments: Mapping[str, Any], rows: Mapping[str, Row]
) -> dict[str, Any]:
    """Returns the variables of the environment that have rows; model_kwargs sets variables as well."""
    of_file = arguments.get("ENV")  # of a file of arguments; the shell's take precedence
    variables: dict[str, Any] = {**(of_file if isinstance(of_file, Mapping) else {}), **environment(command)}
    try:
        given = mapping(arguments.get("model_kwargs") or {})
    except ValueError:  # is reported by its row
        given = {}
    config.lost += [
        f"model_kwargs: {name}={value}: no key here corresponds"
        for name, value in given.items()
        if name.upper() not in rows
    ]
    variables |= {name.upper(): value for name, value in given.items()}
    return {name: value for name, value in variables.items() if name in rows}


_FREEZES = ("freeze_vit", "freeze_aligner", "freeze_llm")
_RATES = {
    "vit_lr": ("optimizer.tower_lr", "model.vision.freeze_tower"),
    "aligner_lr": ("optimizer.projector_lr", "model.vision.freeze_projector"),
}
"""Learning rate of a part -> our key, and the key that freezes the part."""
_SIZES = ("max_pixels", "MAX_PIXELS", "MIN_PIXELS", "IMAGE_MAX_TOKEN_NUM", "IMAGE_MIN_TOKEN_NUM")


def _images(config: Translation, run: Settings) -> None:
    """Sets what is trained of a model that reads images, and the sizes of images."""
    parts = Parts(*(Part(is_on(run, name), run.described(name)) for name in _FREEZES))
    tuner = next((name for name in ("tuner_type", "train_type") if run[name] == _LORA_LLM), None)
    if tuner is not None:
        # it reads no other settings of adapters than rank and alpha, and none that freeze
        for key in ("dropout", "scaling", "targets", "modules_to_save"):
            config.drop(f"adapter.{key}")
        config.without_effect += [name for name in _FREEZES if name in run.explicit]
        trained = Part(False, f"{tuner}={_LORA_LLM}", is_full=True)
        parts = Parts(trained, trained, trained)
    if not put_images(config, run, parts, (*_FREEZES, *_SIZES, *_RATES)):
        return
    for name, (key, freezes) in _RATES.items():
        if run[name] is None or config.get(freezes):
            continue  # no effect there either
        config.put(key, run[name], name)
        if config.get("optimizer.min_lr"):
            config.notes.append(f"{name}: optimizer.min_lr is that of the language model, and scales with {key} here")
    knows_tokens = is_qwen3(run["model"])
    for key, kind, default in (("min_pixels", "MIN", 4), ("max_pixels", "MAX", 16384)):
        tokens, pixels = f"IMAGE_{kind}_TOKEN_NUM", f"{kind}_PIXELS"
        if knows_tokens:  # qwen_vl_utils counts in tokens, and resizes instead of the processor
            count = run[tokens]
            if count is None:
                count = default if run[pixels] is None else number(run[pixels]) // PIXELS_PER_TOKEN
            config.put(f"data.images.{key}", int(number(count)) * PIXELS_PER_TOKEN, run.origin(tokens, pixels))
        elif run[pixels] is not None:
            config.put(f"data.images.{key}", run[pixels], pixels)
        if not knows_tokens and run[tokens] is not None:
            config.lost.append(f"{tokens}={run[tokens]}: data.images.{key} is an area in pixels")
    earlier = config.get("data.images.max_pixels")
    if run["max_pixels"] is not None and (earlier is None or number(run["max_pixels"]) < earlier):
        config.drop("data.images.max_pixels")
        config.put("data.images.max_pixels", run["max_pixels"], "max_pixels")


def _precision(config: Translation, run: Settings) -> None:
    """Sets the precision; without bf16 and fp16, torch_dtype decides."""
    names = ("bf16", "fp16", "torch_dtype")
    kind = run["torch_dtype"] if run["torch_dtype"] != "auto" else None
    is_16 = is_on(run, "fp16") if run["fp16"] is not None else kind in ("float16", "float32")
    is_brain = is_on(run, "bf16") if run["bf16"] is not None else kind in (None, "bfloat16")
    config.put("train.precision", "fp16" if is_16 else "bf16" if is_brain else "fp32", run.described(*names))


def _head(config: Translation, run: Settings) -> None:
    kind, count = run["task_type"] or "causal_lm", run["num_labels"]
    if kind == "seq_cls" and run["problem_type"] != "multi_label_classification":
        is_number = run["problem_type"] == "regression" or (count is not None and number(count) == 1)
        config.put(
            "loss.function", "regression" if is_number else "classification", run.described("task_type", "problem_type")
        )
        config.put("model.num_labels", count, run.origin("num_labels"))
    elif kind != "causal_lm":
        config.lost.append(
            f"{run.described('task_type', 'problem_type')}: only classification and regression heads are supported"
        )


def _rate(config: Translation, run: Settings, name: str, *, is_adapted: bool) -> None:
    default = 1e-4 if is_adapted else 1e-5
    config.put("optimizer.lr", default if run[name] is None else run[name], run.origin(name))


def _of_megatron(config: Translation, run: Settings) -> None:
    epochs = "max_epochs" if "max_epochs" in run.explicit else "num_train_epochs"
    if run[epochs] is not None:  # takes precedence over a number of steps
        config.put("train.num_epochs", run[epochs], run.origin(epochs))
    else:
        put_length(config, run, "train_iters", epochs)
    share, end = run["lr_warmup_fraction"], config.get("optimizer.decay_steps")
    if share is not None and end is not None and config.get("optimizer.schedule") != "wsd":
        steps = math.ceil(Fraction(str(share)) * end)
        config.put("optimizer.warmup_steps", steps, "lr_warmup_fraction x lr_decay_iters")
    else:
        put_warmup(config, run, "lr_warmup_iters", "lr_warmup_fraction", rounds_up=True)
    if is_on(run, (switch := "use_megatron_fsdp")):
        strategy = "data_parallel_sharding_strategy"
        put_shard(config, run.origin(switch, strategy), is_whole=run[strategy] == "optim_grads_params")
    if run["tensor_model_parallel_size"] in (None, 1, "1"):
        config.drop("layout.sp")
    if config.get("optimizer.schedule") == "wsd" and run["lr_wsd_decay_style"] != "linear":
        config.lost.append(f"lr_wsd_decay_style={run['lr_wsd_decay_style']}: wsd falls linearly here")
    layers = run["recompute_num_layers"]
    if config.get("train.recompute") == "full" and run["recompute_method"] == "block" and layers is not None:
        config.put("train.recompute_layers", layers, run.origin("recompute_num_layers"))
    is_given = run["calculate_per_token_loss"] is not None
    if not (is_on(run, "calculate_per_token_loss") if is_given else run["rlhf_type"] is None):
        config.notes.append(
            "calculate_per_token_loss=false averages the means of microbatches and data-parallel ranks; "
            "loss.aggregation=token-mean is the mean over all tokens, under every layout"
        )
    count, size = number(run["eval_iters"]), config.get("train.global_batch_size")
    if count > 0:
        config.put("valid.max_samples", count * size, "eval_iters x global_batch_size")


def _experts(config: Translation, run: Settings) -> None:
    kinds = listed(run["moe_router_load_balancing_type"] or "aux_loss")
    coefficients = [number(text) for text in listed(run["moe_aux_loss_coeff"] or 0)]
    for kind, coefficient in zip(kinds, coefficients * len(kinds) if len(coefficients) == 1 else coefficients):
        if kind in BALANCE and coefficient:
            config.put(BALANCE[kind], coefficient, f"moe_aux_loss_coeff, moe_router_load_balancing_type={kind}")
        elif kind not in BALANCE and kind != "none":
            config.lost.append(
                f"moe_router_load_balancing_type={kind}: only {', '.join(BALANCE)} and none are translated"
            )
    permit_layout_dependent(config)


def _eight_bits(config: Translation, run: Settings) -> None:
    if run["fp8_format"] is not None and run["fp8_recipe"] == "delayed":
        config.lost.append("fp8_recipe=delayed, ms-swift's default: checkpoints here do not contain its scales")
    elif run["fp8_format"] is not None:
        config.put("train.fp8_recipe", run["fp8_recipe"], run.origin("fp8_recipe"))


def _of_transformers(config: Translation, run: Settings) -> None:
    put_length(config, run, "max_steps", "num_train_epochs")
    put_sharding(config, run)
    put_warmup(config, run, "warmup_steps", "warmup_ratio", rounds_up=True)
    put_schedule(config, run)
    if run["gradient_accumulation_steps"] is None:
        config.put("train.global_batch_size", 16, "ms-swift's default of gradient_accumulation_steps, for 16 samples")
    else:
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        put_whole_batch(config, run, names, is_of_one_rank=True)


def _paths(config: Translation, run: Settings, parent: str) -> None:
    """Sets the run folder, intervals and the number of checkpoints, by default unlimited."""
    for name in ("save_interval", "save_steps"):
        put_interval(config, run, name, "checkpoint.interval_steps")
    for name in ("eval_interval", "eval_steps"):
        put_interval(config, run, name, "valid.interval_steps")
    if isinstance(run["model"], str):
        config.put("run.dir", f"{parent}/{Path(run['model']).name}", "ms-swift's default of output_dir")
    interval = config.get("checkpoint.interval_steps")
    if config.get("loss.function") == "simpo":
        put_likelihood(config, run)
    if interval and config.get("checkpoint.keep_last") is None:
        config.put("checkpoint.keep_every_steps", interval, "ms-swift's default of save_total_limit, which keeps all")
    if config.get("data.valid"):
        config.drop("data.split")  # ms-swift then ignores the share
    if config.get("valid.interval_steps") is None:
        config.put("valid.interval_steps", interval, "ms-swift's default of eval_steps")
    name = "eval_strategy" if run["eval_strategy"] is not None else "evaluation_strategy"
    if str(run[name]) in ("no", "False"):
        config.drop("valid")
    elif run[name] is not None and str(run[name]) != "steps":
        config.lost.append(f"{name}={run[name]}: valid.interval_steps is a number of steps")
        config.drop("valid", is_named=False)
    put_best(config, run, "early_stop_interval")
    put_project(config, run, "swanlab", "swanlab_project", "swanlab_exp_name")
    if run["eval_iters"] is not None and number(run["eval_iters"]) == 0:
        config.drop("valid")
    if not {"wandb", "swanlab"} & set(listed(run["report_to"] or [])):
        config.drop("metrics.project")
