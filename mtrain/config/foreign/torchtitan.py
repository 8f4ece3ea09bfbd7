"""Translation of torchtitan's TOML files and arguments.

Source: torchtitan 0.2.2, config/job_config.py, components and models.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from mtrain.config.foreign.reading import Form, comma_list, read_settings, without_unknown
from mtrain.config.foreign.sharding import put_shard
from mtrain.config.foreign.trainers import COMMON, is_on, last_rate, put_architecture, put_whole_batch, recomputed
from mtrain.config.foreign.translation import Settings, Translation, rows_of, translated
from mtrain.config.foreign.values import boolean, listed, number
from mtrain.config.tables import table

_TABLE = table("torchtitan")
_PARALLEL, _SCHEDULE = "parallelism.", "lr_scheduler."
_PER_STAGE = {"Interleaved1F1B": 2, "1F1B": 1, "GPipe": 1}
"""Schedule of a pipeline -> stages per rank, unless layers per stage say otherwise."""
_FORMATS = {"float8": ("hybrid", None), "mx": ("e4m3", "mxfp8")}
"""Converter -> train.fp8, and train.fp8_recipe unless other keys set it."""


def _wandb(config: Translation, value: Any, name: str) -> None:
    if boolean(value):
        config.put("metrics.trackers", ["wandb"], name)


def _converters(config: Translation, value: Any, name: str) -> None:
    for converter in comma_list(value):
        kind = converter.removeprefix("quantize.").removeprefix("linear.")
        if kind in _FORMATS:
            config.put("train.fp8", _FORMATS[kind][0], f"{name}: {converter}")
            config.put("train.fp8_recipe", _FORMATS[kind][1], f"{name}: {converter}")
        else:
            config.lost.append(f"{name}: {converter}: train.fp8 is the nearest key")


def _recomputed_kind(config: Translation, value: Any, name: str) -> None:
    recomputed(config, "full" if value == "memory_budget" else value, name)
    if value == "memory_budget":
        config.lost.append(f"{name}={value}: train.recompute is none, selective or full, and memory decides nothing")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **COMMON,
    "wandb": _wandb,
    "converters": _converters,
    "recomputed_kind": _recomputed_kind,
    "listed": listed,
}
TORCHTITAN = rows_of(_TABLE, _FUNCTIONS)
"""Dotted key of torchtitan -> treatment."""


def from_torchtitan(words: Sequence[str]) -> Translation:
    """Translates TOML files and arguments `--section.key value`; skips a launcher.

    Raises:
        ConfigError: A file cannot be read, or nothing is given.
    """
    config = Translation("torchtitan")
    files = [word.partition("=")[2] for word in words if word.startswith("CONFIG_FILE=")]
    given = read_settings(config, [*files, *words], Form(TORCHTITAN, (), ("job.config_file",), whole=()))
    run = translated(config, without_unknown(config, given.settings), TORCHTITAN)
    for put in (_model, _decay, _data, _validation, _schedule, _layout, _batch, _checkpoint, _compiled):
        put(config, run)
    config.put("optimizer.decay_norms_and_biases", True, "torchtitan's default, which decays all parameters")
    config.report_unmentioned(run.explicit)
    return config


def _model(config: Translation, run: Settings) -> None:
    """Sets the model: a folder with weights, or the sizes of a flavor with random weights."""
    folder = run["model.tokenizer_path"] if "model.tokenizer_path" in run.explicit else run["model.hf_assets_path"]
    origin = run.origin("model.hf_assets_path", "model.tokenizer_path")
    config.put("data.tokenizer", folder, origin)
    path = run["checkpoint.initial_load_path"]
    if is_on(run, "checkpoint.initial_load_in_hf"):
        _balance(config, run)
        config.put(
            "model.hf",
            folder if path is None else path,
            run.origin("checkpoint.initial_load_in_hf", "checkpoint.initial_load_path"),
        )
        return
    if path is not None:
        config.lost.append(
            f"checkpoint.initial_load_path={path}: a checkpoint of torchtitan; convert it to Hugging Face's format, "
            "and name that folder in model.hf"
        )
    names = ("model.name", "model.flavor")
    flavor = str(run[names[1]]).removesuffix("_flex").removesuffix("_varlen").removesuffix("_flex_attn")
    known = _TABLE["models"].get(f"{run[names[0]]} {flavor}")
    if known is None:
        config.lost.append(
            f"{run.described(*names)}: its sizes are not known here; `mtrain init` copies configurations of models, "
            "and model.hf names a folder"
        )
        return
    if run[names[0]] != "deepseek_v3":
        _balance(config, run)
    put_architecture(config, known, run.described(*names))
    config.notes.append(
        "initial weights are normal with model.init_std; torchtitan scales them by the depth of the layer"
    )


def _balance(config: Translation, run: Settings) -> None:
    """Sets or names the loss-free balancing of experts, which torchtitan's models have whatever their weights are."""
    name, origin = str(run["model.name"]), "torchtitan's default of load_balance_coeff"
    if name == "deepseek_v3":  # the sizes of its flavors have the same
        config.put("model.experts.expert_bias", True, origin)
        config.put("model.experts.bias_update_rate", 0.001, origin)
    elif name in ("llama4", "gpt_oss") or re.search(r"A\d+B", str(run["model.flavor"])):
        config.lost.append(
            f"{origin}=0.001: a bias of the router moves towards an even load; "
            "loss.router.sequence_balance_coefficient is the nearest here"
        )


def _decay(config: Translation, run: Settings) -> None:
    """Names the weight decay of Adam, which torch adds to the gradient."""
    if run["optimizer.name"] == "Adam" and number(run["optimizer.weight_decay"]):
        config.lost.append(
            f"optimizer.name=Adam: its weight decay, {run['optimizer.weight_decay']}, is added to the gradient there; "
            "AdamW here applies it to the weights"
        )


def _data(config: Translation, run: Settings) -> None:
    name = "training.dataset_path" if run["training.dataset_path"] is not None else "training.dataset"
    config.put("data.train", [{"path": run[name]}], f"{run.origin(name)}; tokenize it first: mtrain tokenize")
    if name != "training.dataset" and "training.dataset" in run.explicit:
        config.without_effect.append("training.dataset")
    config.notes.append("torchtitan reads documents in file order; here train.seed determines the order")


def _validation(config: Translation, run: Settings) -> None:
    if not is_on(run, "validation.enable"):
        return
    name = "validation.dataset_path" if run["validation.dataset_path"] is not None else "validation.dataset"
    config.put("data.valid", [{"path": run[name]}], f"{run.origin(name)}; tokenize it first: mtrain tokenize")
    config.put("valid.interval_steps", run["validation.freq"], run.origin("validation.freq"))
    if (steps := number(run["validation.steps"])) > 0:
        config.lost.append(
            f"validation.steps={steps}: valid.max_samples counts samples, steps x validation.local_batch_size x ranks"
        )
    if number(run["validation.seq_len"]) != config.get("data.seq_length"):
        config.lost.append(f"{run.described('validation.seq_len')}: validation has rows of data.seq_length too")


def _schedule(config: Translation, run: Settings) -> None:
    """Sets the decay: after the warm-up, or in the last share of the run."""
    warmup, steps = config.get("optimizer.warmup_steps"), config.get("train.num_steps")
    total, ratio = run[f"{_SCHEDULE}total_steps"], run[f"{_SCHEDULE}decay_ratio"]
    kind, kind_origin = str(run[f"{_SCHEDULE}decay_type"]), run.described(f"{_SCHEDULE}decay_type")
    end = steps if total is None else int(number(total))
    if warmup >= end:
        config.drop("optimizer.warmup_steps")
        config.put("optimizer.warmup_steps", max(0, end - 1), f"{_SCHEDULE}warmup_steps, below the steps of the run")
        warmup = max(0, end - 1)
    length = end - warmup if ratio is None else min(round(end * number(ratio)), end - warmup)
    if kind not in ("linear", "cosine"):
        config.lost.append(f"{kind_origin}: optimizer.schedule takes linear, cosine and wsd, which falls linearly")
    if length == end - warmup:
        config.put("optimizer.schedule", "cosine" if kind == "cosine" else "linear", kind_origin)
        if end != steps:
            config.put("optimizer.decay_steps", end, run.origin(f"{_SCHEDULE}total_steps"))
    elif length <= 0:
        config.put("optimizer.schedule", "constant", run.origin(f"{_SCHEDULE}decay_ratio"))
    else:
        config.put("optimizer.schedule", "wsd", run.origin(f"{_SCHEDULE}decay_ratio"))
        config.put("optimizer.decay_steps", length, f"{run.origin(f'{_SCHEDULE}decay_ratio')} x number of steps")
        if kind == "cosine":
            config.lost.append(f"{kind_origin}: the last part of wsd falls linearly here")
        if end != steps:
            config.lost.append(f"{_SCHEDULE}total_steps={total}: the decay of wsd ends with the run")
    last_rate(config, run[f"{_SCHEDULE}min_lr_factor"], run.origin(f"{_SCHEDULE}min_lr_factor"))
    if warmup:
        config.notes.append(
            "a warm-up is one update ahead in torchtitan: its first rate is lr / warmup_steps, and ours 0"
        )


def _layout(config: Translation, run: Settings) -> None:
    tp, pp = config.get("layout.tp"), config.get("layout.pp")
    if tp > 1:
        config.put("layout.sp", True, "torchtitan's default, whose tensor parallelism divides the sequence too")
    rotation = run[f"{_PARALLEL}context_parallel_rotate_method"]
    if config.get("layout.cp") > 1 and rotation == "alltoall":
        config.put("layout.cp_comm", "ring", run.described(f"{_PARALLEL}context_parallel_rotate_method"))
    schedule = str(run[f"{_PARALLEL}pipeline_parallel_schedule"])
    if pp > 1 and schedule not in _PER_STAGE:
        config.lost.append(
            f"{_PARALLEL}pipeline_parallel_schedule={schedule}: the schedule is 1F1B, interleaved if vpp > 1"
        )
    layers, per_stage = config.get("model.num_layers"), run[f"{_PARALLEL}pipeline_parallel_layers_per_stage"]
    stages = _PER_STAGE.get(schedule, 1)
    if per_stage is not None and number(per_stage) > 0 and layers is not None and pp > 1:
        stages = max(1, -(-layers // int(number(per_stage))) // pp)
    if pp > 1 and stages > 1:
        names = [f"{_PARALLEL}pipeline_parallel_{part}" for part in ("schedule", "layers_per_stage")]
        config.put("layout.vpp", stages, run.origin(*names))
    _divide(config, run, pp)


def _divide(config: Translation, run: Settings, pp: int) -> None:
    """Sets `layout.shard`: weights with FSDP, unless it keeps them gathered after the forward pass."""
    names = [f"{_PARALLEL}{name}" for name in ("data_parallel_shard_degree", "fsdp_reshard_after_forward")]
    is_divided, kept = number(run[names[0]]) != 1, str(run[names[1]])
    is_kept = kept == "never" or (kept == "default" and pp > 1)
    put_shard(config, run.described(*names), is_whole=is_divided and not is_kept)
    replicas = f"{_PARALLEL}data_parallel_replicate_degree"
    if number(run[replicas]) > 1 and is_divided:
        config.notes.append(
            f"{run.described(replicas)}: layout.shard divides over all data-parallel ranks, without copies"
        )


def _batch(config: Translation, run: Settings) -> None:
    """Sets the batch sizes of a microbatch, which has its own key with a pipeline, and of a step."""
    name = "training.batch_size" if "training.batch_size" in run.explicit else "training.local_batch_size"
    micro = f"{_PARALLEL}pipeline_parallel_microbatch_size" if config.get("layout.pp") > 1 else name
    config.put("train.micro_batch_size", run[micro], run.origin(micro))
    if (size := int(number(run["training.global_batch_size"]))) > 0:
        config.put("train.global_batch_size", size, run.origin("training.global_batch_size"))
        return
    degrees = [f"{_PARALLEL}data_parallel_{kind}_degree" for kind in ("replicate", "shard")]
    is_known = all(number(run[degree]) > 0 for degree in degrees)
    put_whole_batch(config, run, (name, *(degrees if is_known else ())), is_of_one_rank=not is_known)


def _checkpoint(config: Translation, run: Settings) -> None:
    name = "checkpoint.enable_checkpoint" if "checkpoint.enable_checkpoint" in run.explicit else "checkpoint.enable"
    if not is_on(run, name):
        config.drop("checkpoint")
        config.notes.append("torchtitan saves no checkpoint unless checkpoint.enable is on; here the last one is saved")
        return
    interval = run["checkpoint.interval"]
    config.put("checkpoint.interval_steps", interval, f"{run.origin('checkpoint.interval')}, {name}")
    if config.get("checkpoint.keep_last") is None:
        config.put("checkpoint.keep_every_steps", interval, "checkpoint.keep_latest_k=0, which keeps all")


def _compiled(config: Translation, run: Settings) -> None:
    """Sets what is compiled, and the recipe of 8-bit products."""
    fqns = [name for name in run.explicit if name.startswith(("quantize.", "float8.")) and "fqns" in name]
    if config.get("train.fp8") is not None:
        config.lost += [
            f"{name}={run[name]}: train.fp8 concerns the linear layers of all transformer layers" for name in fqns
        ]
        if is_on(run, "compile.enable"):
            config.lost.append("compile.enable: train.compile=regions excludes the layers that train.fp8 needs")
    elif is_on(run, "compile.enable") and "model" in comma_list(run["compile.components"]):
        config.put("train.compile", "regions", run.origin("compile.enable", "compile.components"))
    recipe = run["quantize.linear.float8.recipe_name"]
    if config.get("train.fp8") == "hybrid":
        row_wise = str(recipe).startswith("rowwise")
        config.put(
            "train.fp8_recipe",
            "rowwise" if row_wise else "tensorwise",
            run.described("quantize.linear.float8.recipe_name"),
        )
