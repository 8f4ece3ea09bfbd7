"""Arguments of ms-swift as a configuration: of `megatron sft` and its sisters, and of `swift sft`.

Source: ms-swift 4.6.0, swift/megatron/arguments, swift/arguments and swift/trainers/arguments.py.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.command_lines import after_launcher, is_variable, options
from mtrain.config.foreign.trainers import (
    BALANCE,
    COMMON,
    PREFERENCES,
    drop_adapter_of_full_runs,
    finish,
    is_on,
    permit_layout_dependent,
    put_interval,
    put_length,
    put_likelihood,
    put_warmup,
    put_whole_batch,
    reward_model,
)
from mtrain.config.foreign.translation import Row, Settings, Translation, choice, lost, rows_of, translated
from mtrain.config.foreign.values import listed, number, scalar
from mtrain.config.load import read_file
from mtrain.config.tables import table


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
            f"{name}={value}: model.hf gives the weights; to start from this, write out `model` instead of model.hf, "
            "and set checkpoint.initialize_from"
        )


def _dtype(value: Any) -> None:
    if value not in ("bfloat16", "float16", "float32", "auto"):
        raise ValueError(f"{value!r} is no type")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **COMMON,
    "adapter": _adapter,
    "preference": _preference,
    "columns": _columns,
    "tokens": _tokens,
    "start": _start,
    "dtype": _dtype,
    "text": str,
    "numbers": lambda value: [number(each) for each in listed(value)],
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
    rows = _rows(command, {*given, *values})
    found = Translation("ms-swift")
    for name, each in values.items():
        is_off = name not in rows and name.startswith("no_") and name[3:] in rows and not each
        if variables := [value for value in each if is_variable(value)]:
            found.wrong.append(f"--{name} {' '.join(variables)}: this is a variable of the shell; write its value")
        else:
            value = each[0] if len(each) == 1 else each
            given[name[3:] if is_off else name] = value if each else not is_off
    if not given and not found.wrong:
        raise ConfigError("there are no arguments that begin with --; give those of `megatron sft`")
    run = translated(found, given, rows)
    of_engine = (_of_megatron, _experts, _eight_bits) if "train_iters" in rows else (_of_transformers,)
    for put in (_precision, _head, *of_engine):
        put(found, run)
    is_adapted = any(run[name] not in (None, "full") for name in ("tuner_type", "train_type"))
    is_adapted = is_adapted and run["train_type"] != "full"
    drop_adapter_of_full_runs(found, is_adapted=is_adapted)
    _rate(found, run, "lr" if "lr" in rows else "learning_rate", is_adapted=is_adapted)
    if "rlhf" in command and run["rlhf_type"] is None:
        found.put("loss.function", "dpo", "ms-swift's default of rlhf_type")
    _places(found, run, "megatron_output" if "train_iters" in rows else "output")
    found.notes.append("ms-swift renders conversations with its own templates; here the tokenizer's is used")
    finish(found, run)
    return found


def _rows(command: Sequence[str], names: set[str]) -> dict[str, Row]:
    """Returns the rows of `megatron` or `swift`, by the command or by arguments that only one has."""
    text = " ".join(command)
    is_megatron = "megatron" in text or ("swift" not in text and not names & (MS_SWIFT.keys() - MEGATRON.keys()))
    rows = dict(MEGATRON if is_megatron else MS_SWIFT)
    if "rlhf" in command:
        rows["loss_scale"] = Row(rows["loss_scale"].put, "last_round")
    if "pt" in command:
        rows["loss_scale"] = Row(rows["loss_scale"].put, "all")
        rows["use_chat_template"] = lost("conversations are rendered by a template", False)
    return rows


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
