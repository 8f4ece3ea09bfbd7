"""Translation of settings that finetuning programs share: files, schedules, adapters, batches, models."""

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, get_args

from mtrain.base.version import SHARED
from mtrain.config.derived import LAYOUT_DEPENDENT_KEYS
from mtrain.config.foreign.images import part_of_tower
from mtrain.config.foreign.objectives import drop_dropout, finish_loss, objective_of, reward_model
from mtrain.config.foreign.translation import Put, Settings, Translation, above_0, choice, unless_0
from mtrain.config.foreign.values import boolean, fitting, is_same, listed, number
from mtrain.config.load import read_mapping
from mtrain.config.schema import bounds
from mtrain.config.schema.adapter import ALL_LINEAR, GROUPS, PARTS, SAVED_SYNONYMS, SYNONYMS
from mtrain.config.schema.run import TrackerName
from mtrain.config.tables import table

SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "WSD": "wsd",
}
"""Schedule in another program -> optimizer.schedule."""
BALANCE: Mapping[str, str] = table("megatron_lm")["balance"]
"""Kind of load balancing in Megatron-LM -> our key of its coefficient."""
schedule_of = choice("optimizer.schedule", SCHEDULES).put
TARGETS = frozenset((*PARTS, *GROUPS, *SYNONYMS))
_ADAMW = frozenset(
    ("adam", "adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla")
) | {"adamw_torch_npu_fused", "optimi_adamw", "paged_adamw", "paged_adamw_32bit"}
_LOW_BIT_ADAMW = frozenset(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw8bit", "ao_adamw_8bit")) | {
    "ao_adamw_4bit",
    "ao_adamw_fp8",
}
"""Names of AdamW with low-bit moments."""


def recomputed(config: Translation, value: Any, name: str) -> None:
    """Sets recomputation, from a kind's name or a switch; false, none and 0 mean none."""
    kinds = {"none": "none", "selective": "selective", "full": "full", "offload": "full", "offload_disk": "full"}
    kind = kinds.get(value) if isinstance(value, str) else None
    config.put("train.recompute", kind or ("full" if boolean(value) else "none"), name)


def held_out(config: Translation, value: Any, name: str) -> None:
    """Sets the share of records that make up the validation set."""
    share = number(value)
    if share >= 1:
        config.lost.append(f"{name}={value}: data.split takes shares, not a number of records; name data.valid")
    elif share:
        config.put("data.split", [float(1 - Fraction(str(share))), share, 0.0], f"{name}, by records in file order")


def files_of(key: str) -> Put:
    """Returns a function that sets `key` to the paths of one or several files."""

    def put(config: Translation, value: Any, name: str) -> None:
        if value is False or not all(isinstance(path, str) for path in listed(value)):
            raise ValueError(f"{value!r} is not a path")
        sources = []
        for path in listed(value):
            path, counted, count = path.partition("#")
            if counted:
                config.lost.append(f"{name}={path}#{count}: all records are read; write a file with the ones you want")
            sources.append({"path": path})
        config.put("data.kind", "sft", name)
        config.put(key, sources, f"{name}; paths on this machine")

    return put


def folder_of(config: Translation, value: Any, name: str) -> None:
    """Sets a model folder, and its tokenizer unless one is set."""
    config.put("model.hf", value, f"{name}; a folder: hf download {value} --local-dir DIR")
    if config.get("data.tokenizer") is None:
        config.put("data.tokenizer", value, f"{config.program}'s default, the folder of {name}")


def packing_of(batch: str) -> Put:
    """Returns a function that turns packing on or off, with `batch` as the unit of a batch."""
    return lambda config, value, name: config.put("data.packing", {"batch": batch} if boolean(value) else None, name)


def trackers(config: Translation, value: Any, name: str) -> None:
    """Sets the supported trackers of a list, and reports others."""
    known = [tracker for tracker in listed(value) if tracker in get_args(TrackerName)]
    config.put("metrics.trackers", known or None, name)
    if unknown := [
        str(tracker) for tracker in listed(value) if tracker not in (*known, "tensorboard", "console", "none")
    ]:
        config.lost.append(f"{name}={', '.join(unknown)}: only {', '.join(get_args(TrackerName))} are supported")


def optimizer_of(config: Translation, value: Any, name: str) -> None:
    """Sets AdamW, under any of its names; reports other optimizers."""
    kind = str(value).lower()
    if kind in _ADAMW or kind in _LOW_BIT_ADAMW:
        config.put("optimizer.kind", "adamw", name if config.is_default(name) else f"{name}={value}")
    if kind in _LOW_BIT_ADAMW:
        config.lost.append(f"{name}={value}: low-bit moments; here they are float32")
    elif kind not in _ADAMW:
        config.lost.append(f"{name}={value}: only AdamW is translated; optimizer.kind=muon has its own keys")


def put_interval(config: Translation, run: Settings, name: str, key: str) -> None:
    """Sets a number of steps between events; below 1 it is a share of the run."""
    if run[name] is None:
        return
    steps, whole = number(run[name]), config.get("train.num_steps")
    if not 0 < steps < 1:
        config.put(key, max(0, steps), run.origin(name))
    elif isinstance(whole, int):
        config.put(key, max(1, int(steps * whole)), f"{run.origin(name)} x number of steps")
    else:
        config.lost.append(
            f"{name}={run[name]}: {key} is a number of steps, and the length of the run is not known yet"
        )


def put_length(config: Translation, run: Settings, steps: str, epochs: str) -> None:
    """Sets the length of a run: its steps if above 0, otherwise its epochs."""
    count = number(run[steps]) if run[steps] is not None else 0
    if count > 0:
        config.put("train.num_steps", count, run.origin(steps))
        config.drop("train.num_epochs")
    elif run[epochs] is not None:
        config.put("train.num_epochs", run[epochs], run.origin(epochs))


def put_warmup(config: Translation, run: Settings, steps: str, ratio: str, *, rounds_up: bool = False) -> None:
    """Sets the warm-up from `steps` if above 0 (a share if below 1), otherwise from `ratio`.

    Args:
        steps: Key of the number of steps.
        ratio: Key of the share of steps.
        rounds_up: Whether the program rounds a share up to whole steps, as we do.
    """
    count = number(run[steps]) if run[steps] is not None else 0
    name, share = (ratio, run[ratio]) if count <= 0 else (steps, count if count < 1 else None)
    if share is None or not number(share):
        config.put("optimizer.warmup_steps", max(0, count), run.origin(steps, ratio))
        return
    whole = config.get("train.num_steps")
    if isinstance(whole, int) and not rounds_up:
        config.put("optimizer.warmup_steps", int(number(share) * whole), f"{run.origin(name)} x number of steps")
        return
    config.put("optimizer.warmup_ratio", share, run.origin(name))
    if not rounds_up:
        config.notes.append(f"{name} is rounded down to whole steps in {config.program}, and up here")


def last_rate(config: Translation, ratio: Any, origin: str) -> None:
    """Sets the final learning rate, given as a fraction of the peak rate."""
    if (rate := config.get("optimizer.lr")) is not None and number(ratio):
        config.put("optimizer.min_lr", number(ratio) * rate, f"{origin} x learning rate")


def targets(config: Translation, value: Any, name: str) -> None:
    """Sets the modules that get adapters, and reports unknown ones."""
    if isinstance(value, str) and set(value) & _OF_PATTERNS:
        value = _matching(config, value, name)
    modules = [
        ALL_LINEAR if str(name_or_path).replace("_", "-") == ALL_LINEAR else name_or_path
        for name_or_path in listed(value)
    ]
    modules = [_last_part(module) for module in modules]
    if unknown := [str(module) for module in modules if module not in TARGETS]:
        config.lost.append(
            f"{name}={', '.join(unknown)}: no module here has this name; docs/training/lora.md lists the names"
        )
    known = [*(config.get("adapter.targets") or []), *(module for module in modules if module in TARGETS)]
    config.put("adapter.targets", list(dict.fromkeys(known)) or None, name)


def _last_part(module: Any) -> Any:
    """Returns the name of a module after that of its parent, such as o_proj of self_attn.o_proj."""
    last = str(module).rpartition(".")[2]
    return last if last in TARGETS else module


def _matching(config: Translation, pattern: str, name: str) -> list[str]:
    """Returns the targets whose modules a regular expression matches, as PEFT does; reports what it cannot mean."""
    try:
        expression = re.compile(pattern)
    except re.error as fault:
        raise ValueError(f"{pattern} is not a regular expression") from fault
    found = {}
    for module in _MODULES:
        paths = [[prefix + f"{layer}.{module}" for prefix in _LAYERS] for layer in range(_MATCHED_LAYERS)]
        found[module.split(".")[-1]] = [any(map(expression.fullmatch, names)) for names in paths]
    if some := [module for module, hits in found.items() if any(hits) and not all(hits)]:
        config.lost.append(f"{name}: {', '.join(some)}: only in some layers; adapter.targets are modules of all layers")
    matched = [module for module, hits in found.items() if any(hits)]
    if not matched:
        config.lost.append(
            f"{name}={pattern}: matches no module of a layer here; docs/training/lora.md lists the names"
        )
    return matched


_OF_PATTERNS = frozenset("[]()|*+?^$\\.")
"""Characters of regular expressions that names of modules lack."""
_MODULES = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    *(f"linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")),
)
_LAYERS = ("model.layers.", "model.language_model.layers.", "language_model.model.layers.")
_MATCHED_LAYERS = 24
"""Layers whose names are matched; a pattern that names more layers is one of some layers."""


def saved(config: Translation, value: Any, name: str) -> None:
    """Sets fully trained modules, and reports unsupported ones."""
    modules = listed(value)
    in_tower = {str(module): part_of_tower(str(module)) for module in modules if module not in SAVED_SYNONYMS}
    config.saved_in_tower |= {key: name for keys in in_tower.values() for key in keys}
    if unknown := [module for module, keys in in_tower.items() if not keys]:
        config.lost.append(
            f"{name}={', '.join(unknown)}: only embed_tokens, lm_head, norm, a head, a vision tower and its projector "
            "can be trained in full with adapters"
        )
    config.put("adapter.modules_to_save", [module for module in modules if module in SAVED_SYNONYMS] or None, name)


def tracker_of(name: str) -> Put:
    """Returns a function that adds a tracker, if its switch is on."""

    def put(config: Translation, value: Any, origin: str) -> None:
        if boolean(value):
            config.put("metrics.trackers", [*(config.get("metrics.trackers") or []), name], origin)

    return put


def resumed(config: Translation, value: Any, name: str) -> None:
    """Reports a checkpoint to continue from; a switch changes nothing, since a run continues from its own folder."""
    if str(value).lower() not in ("true", "false", "auto", "latest", "1", "0"):
        config.lost.append(
            f"{name}={value}: a run continues from the newest checkpoint of its own folder; "
            "checkpoint.initialize_from takes the weights of another one"
        )


def recomputed_modules(config: Translation, value: Any, name: str) -> None:
    """Sets the modules that selective recomputation recomputes, and reports others."""
    known = [module for module in listed(value) if module in ("core_attn", "mlp", "moe", "shared_experts")]
    config.put("train.recompute_modules", known or None, name)
    if unknown := [str(module) for module in listed(value) if module not in known]:
        config.lost.append(
            f"{name}={', '.join(unknown)}: train.recompute_modules has core_attn, mlp, moe, shared_experts"
        )


def compiled(config: Translation, value: Any, name: str) -> None:
    """Sets what torch.compile compiles, from a switch or auto."""
    kind = "auto" if value == "auto" else "regions" if boolean(value) else None
    config.put("train.compile", kind, name)


def seconds(value: Any) -> int:
    """Returns a time in seconds, at most the longest that a key takes."""
    return min(int(number(value)), bounds.MAX_SECONDS)


def put_project(config: Translation, run: Settings, tracker: str, project: str, name: str | None) -> None:
    """Sets the project and the name of the run from settings of a tracker, if the run has it."""
    if tracker not in (config.get("metrics.trackers") or []):
        return
    if config.is_default(config.origins.get("metrics.project", "")):
        config.drop("metrics.project")
    config.put("metrics.project", run[project], run.origin(project))
    if name is not None:
        config.put("run.name", run[name], run.origin(name))


def put_best(config: Translation, run: Settings, patience: str | None) -> None:
    """Sets early stopping and the best checkpoints from the arguments of transformers' Trainer.

    Args:
        patience: Setting with the number of validations without an improvement that end the run.
    """
    is_validated = config.get("data.valid") or (config.get("data.split") or (1, 0))[1]
    if is_on(run, "load_best_model_at_end") and not is_validated:
        config.lost.append("load_best_model_at_end: checkpoint.keep_best compares validations; name data.valid")
    elif is_on(run, "load_best_model_at_end"):
        config.put("checkpoint.keep_best", 1, "load_best_model_at_end")
        config.notes.append("load_best_model_at_end: the best checkpoint is kept, and the last one is the result here")
    metric = str(run["metric_for_best_model"] or "loss")
    if metric.removeprefix("eval_") != "loss":
        config.lost.append(
            f"metric_for_best_model={metric}: valid.metric is the loss of a set of data.valid, or task/metric of "
            "eval.tasks"
        )
    elif is_on(run, "greater_is_better"):
        config.lost.append("greater_is_better=true: a lower loss is better")
    if patience is None or run[patience] is None or number(run[patience]) <= 0:
        return
    if config.get("valid.interval_steps") and is_validated:
        config.put("valid.patience", run[patience], patience)
    else:
        config.lost.append(
            f"{patience}={run[patience]}: valid.patience counts validations; name data.valid, and set "
            "valid.interval_steps"
        )


def pattern_of(key: str) -> Put:
    """Returns a function that sets `key` to numbers by module, if all modules have names here."""

    def put(config: Translation, value: Any, name: str) -> None:
        if unknown := [target for target in value if target not in TARGETS]:
            config.lost.append(f"{name}={value}: {', '.join(unknown)} is not a target; name targets, such as q_proj")
        else:
            config.put(key, value, name)

    return put


def drop_adapter_of_full_runs(config: Translation, *, is_adapted: bool) -> None:
    """Drops the adapter of a run that trains all weights."""
    if not is_adapted:
        config.drop("adapter")
        config.without_effect += dict.fromkeys(config.saved_in_tower.values())
        config.saved_in_tower.clear()


def finish(config: Translation, run: Settings) -> None:
    """Completes the translation of a run on records: drops unused keys and reports unmentioned settings."""
    if config.get("data.kind") is None:
        config.put("data.kind", "sft", f"{config.program} reads records")
    if config.get("data.kind") == "sft":
        config.notes.append("a sample has up to data.seq_length + 1 tokens here; the last one is only predicted")
    finish_loss(config)
    if config.get("adapter.kind") == "dora":
        drop_dropout(config, "adapter.kind=dora has no dropout")
    for key, name in config.saved_in_tower.items():
        config.lost.append(f"{name}: the model has no vision tower here; set model.vision.{key}=false if it has one")
    split = config.get("data.split")
    if not config.get("data.valid") and not (split and split[1]):
        config.drop("valid")
    config.report_unmentioned(run.explicit)


def put_whole_batch(config: Translation, run: Settings, names: tuple[str, ...], *, is_of_one_rank: bool) -> None:
    """Sets the samples of a step to the product of the settings `names`.

    Args:
        names: Settings such as a rank's batch, gradient accumulation steps and numbers of ranks.
        is_of_one_rank: Whether the product omits the number of data-parallel ranks, which is unknown.
    """
    is_given = any(name in run.explicit for name in names)
    size = math.prod(int(number(run[name])) for name in names)
    config.put("train.global_batch_size", size, " x ".join(names) if is_given else run.origin(*names))
    if is_of_one_rank:
        config.notes.append(
            f"train.global_batch_size={size} counts one data-parallel rank: multiply it by the number of ranks"
        )


def permit_layout_dependent(config: Translation) -> None:
    """Permits the layout-dependent keys that are set."""
    for key in LAYOUT_DEPENDENT_KEYS:
        if config.get(key):
            config.put("loss.allow_layout_dependent", True, f"{key} depends on the layout by definition")


def put_architecture(config: Translation, entry: Mapping[str, Any], origin: str) -> None:
    """Sets the sizes of a model with random weights.

    Args:
        entry: `like`, the name of a shipped configuration of a model, and the keys in which this model differs.
        origin: Names of the settings that choose the model.
    """
    content = read_mapping(SHARED / "configs" / "model" / f"{entry['like']}.yaml")["model"]
    for key, value in {**content, **entry}.items():
        config.put(f"model.{key}", None if key == "like" else value, origin)


def is_on(run: Settings, name: str) -> bool:
    return run[name] is not None and is_same(run[name], True)


COMMON: Mapping[str, Callable[..., Any]] = {
    "above_0": above_0,
    "boolean": boolean,
    "compiled": compiled,
    "files_of": files_of,
    "folder_of": folder_of,
    "held_out": held_out,
    "modules": recomputed_modules,
    "number": number,
    "objective_of": objective_of,
    "optimizer_of": optimizer_of,
    "packing_of": packing_of,
    "path": lambda value: fitting("model.hf", value),
    "pattern_of": pattern_of,
    "recomputed": recomputed,
    "reward_model": reward_model,
    "saved": saved,
    "resumed": resumed,
    "schedule_of": schedule_of,
    "seconds": seconds,
    "targets": targets,
    "text": str,
    "tracker": tracker_of,
    "trackers": trackers,
    "unless_0": unless_0,
}
"""Name in the tables of several programs -> function."""
