"""Common settings of finetuning programs: files, schedules, adapters, losses on pairs of answers."""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from mtrain.config.derived import LAYOUT_DEPENDENT_KEYS
from mtrain.config.foreign.translation import Put, Settings, Translation, above_0, choice, unless_0
from mtrain.config.foreign.values import boolean, is_same, listed, number
from mtrain.config.schema.adapter import ALL_LINEAR, GROUPS, PARTS, SAVED_SYNONYMS, SYNONYMS
from mtrain.config.tables import table

SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "WSD": "wsd",
}
"""Name of a schedule -> ours."""
BALANCE: Mapping[str, str] = table("megatron_lm")["balance"]
"""Kind of load balancing of Megatron-LM -> key of its coefficient."""
schedule_of = choice("optimizer.schedule", SCHEDULES).put
PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo")
TARGETS = frozenset((*PARTS, *GROUPS, *SYNONYMS))
_ADAMW = frozenset(
    ("adam", "adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla")
) | {"adamw_torch_npu_fused", "optimi_adamw", "paged_adamw", "paged_adamw_32bit"}
_OF_FEW_BITS = frozenset(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw8bit", "ao_adamw_8bit")) | {
    "ao_adamw_4bit",
    "ao_adamw_fp8",
}
"""Optimizers that are AdamW with low-bit moments."""


def recomputed(found: Translation, value: Any, name: str) -> None:
    """Puts recomputation: true, a name of a kind, or false, none or 0 for nothing."""
    kinds = {"none": "none", "selective": "selective", "full": "full", "offload": "full", "offload_disk": "full"}
    kind = kinds.get(value) if isinstance(value, str) else None
    found.put("train.recompute", kind or ("full" if boolean(value) else "none"), name)


def held_out(found: Translation, value: Any, name: str) -> None:
    """Puts a share of the records as the validation set."""
    share = number(value)
    if share >= 1:
        found.lost.append(f"{name}={value}: data.split takes shares, not a number of records; name data.valid")
    elif share:
        found.put("data.split", [float(1 - Fraction(str(share))), share, 0.0], f"{name}, by records in file order")


def files_of(key: str) -> Put:
    """Returns a function that puts the paths of one or several files."""

    def put(found: Translation, value: Any, name: str) -> None:
        if value is False or not all(isinstance(path, str) for path in listed(value)):
            raise ValueError(f"{value!r} is no path")
        sources = []
        for path in listed(value):
            path, counted, count = path.partition("#")
            if counted:
                found.lost.append(f"{name}={path}#{count}: all records are read; make a file of some")
            sources.append({"path": path})
        found.put("data.kind", "sft", name)
        found.put(key, sources, f"{name}; paths on this machine")

    return put


def folder_of(found: Translation, value: Any, name: str) -> None:
    """Puts a model folder, and its tokenizer unless one was named."""
    found.put("model.hf", value, f"{name}; a folder: hf download {value} --local-dir DIR")
    if found.get("data.tokenizer") is None:
        found.put("data.tokenizer", value, f"{found.program}'s default, the folder of {name}")


def packing_of(batch: str) -> Put:
    """Returns a function that puts whether samples are packed, into rows that `batch` counts."""
    return lambda found, value, name: found.put("data.packing", {"batch": batch} if boolean(value) else None, name)


def trackers(found: Translation, value: Any, name: str) -> None:
    """Puts the supported trackers of a list."""
    known = [each for each in listed(value) if each in ("wandb", "mlflow", "trackio")]
    found.put("metrics.trackers", known or None, name)
    if others := [str(each) for each in listed(value) if each not in (*known, "tensorboard", "console", "none")]:
        found.lost.append(f"{name}={', '.join(others)}: trackers are wandb, mlflow and trackio")


def optimizer_of(found: Translation, value: Any, name: str) -> None:
    """Puts AdamW under any of its names."""
    kind = str(value).lower()
    if kind in _ADAMW or kind in _OF_FEW_BITS:
        found.put("optimizer.kind", "adamw", name if found.is_default(name) else f"{name}={value}")
    if kind in _OF_FEW_BITS:
        found.lost.append(f"{name}={value}: moments have few bits there; here they are float32")
    elif kind not in _ADAMW:
        found.lost.append(f"{name}={value}: only AdamW is translated; optimizer.kind=muon has its own keys")


def put_interval(found: Translation, run: Settings, name: str, key: str) -> None:
    """Puts a number of steps between events, or a share of the run below 1."""
    if run[name] is None:
        return
    steps, whole = number(run[name]), found.get("train.num_steps")
    if not 0 < steps < 1:
        found.put(key, max(0, steps), run.origin(name))
    elif isinstance(whole, int):
        found.put(key, max(1, int(steps * whole)), f"{run.origin(name)} x number of steps")
    else:
        found.lost.append(f"{name}={run[name]}: {key} is a number of steps, and that of the run is not known here")


def put_length(found: Translation, run: Settings, steps: str, epochs: str) -> None:
    """Puts the length of a run, by steps if above 0, else by epochs."""
    count = number(run[steps]) if run[steps] is not None else 0
    if count > 0:
        found.put("train.num_steps", count, run.origin(steps))
        found.drop("train.num_epochs")
    elif run[epochs] is not None:
        found.put("train.num_epochs", run[epochs], run.origin(epochs))


def put_warmup(found: Translation, run: Settings, steps: str, ratio: str, *, rounds_up: bool = False) -> None:
    """Puts the warm-up: a number of steps above 0, or a share below 1; else the share `ratio`.

    Args:
        steps: Key that counts steps.
        ratio: Key that gives a share of the steps.
        rounds_up: Whether the program rounds a share up to whole steps, as we do.
    """
    count = number(run[steps]) if run[steps] is not None else 0
    name, share = (ratio, run[ratio]) if count <= 0 else (steps, count if count < 1 else None)
    if share is None or not number(share):
        found.put("optimizer.warmup_steps", max(0, count), run.origin(steps, ratio))
        return
    whole = found.get("train.num_steps")
    if isinstance(whole, int) and not rounds_up:
        found.put("optimizer.warmup_steps", int(number(share) * whole), f"{run.origin(name)} x number of steps")
        return
    found.put("optimizer.warmup_ratio", share, run.origin(name))
    if not rounds_up:
        found.notes.append(f"{name} is rounded down to whole steps there, and up here")


def last_rate(found: Translation, ratio: Any, origin: str) -> None:
    """Puts the final learning rate, given as a part of the first one."""
    if (rate := found.get("optimizer.lr")) is not None and number(ratio):
        found.put("optimizer.min_lr", number(ratio) * rate, f"{origin} x learning rate")


def targets(found: Translation, value: Any, name: str) -> None:
    """Puts the modules with adapters, some of which may not exist here."""
    modules = [ALL_LINEAR if str(each).replace("_", "-") == ALL_LINEAR else each for each in listed(value)]
    if unknown := [str(module) for module in modules if module not in TARGETS]:
        found.lost.append(
            f"{name}={', '.join(unknown)}: no module here has this name; docs/training/lora.md has a list"
        )
    known = [*(found.get("adapter.targets") or []), *(module for module in modules if module in TARGETS)]
    found.put("adapter.targets", list(dict.fromkeys(known)) or None, name)


def saved(found: Translation, value: Any, name: str) -> None:
    """Puts fully trained modules; only some are supported."""
    modules = listed(value)
    if unknown := [str(module) for module in modules if module not in SAVED_SYNONYMS]:
        found.lost.append(
            f"{name}={', '.join(unknown)}: only embed_tokens, lm_head, norm and a head can be trained in full with "
            "adapters"
        )
    found.put("adapter.modules_to_save", [module for module in modules if module in SAVED_SYNONYMS] or None, name)


def reward_model(found: Translation, value: Any, name: str) -> None:
    """Puts the loss of a reward model and its head, if the switch is on."""
    if boolean(value):
        found.put("loss.function", "reward_model", name)
        found.put("model.num_labels", 1, name)


def put_likelihood(found: Translation, run: Settings) -> None:
    """Reports the likelihood of the chosen answer, which TRL adds to SimPO unless its weight is 0."""
    if number(1 if run["cpo_alpha"] is None else run["cpo_alpha"]):
        found.lost.append(
            f"{run.said('cpo_alpha')}: simpo does not include the likelihood of chosen answers here; see "
            "loss.side_terms"
        )


def pattern_of(key: str) -> Put:
    """Returns a function that puts numbers of single modules, if all have names here."""

    def put(found: Translation, value: Any, name: str) -> None:
        if unknown := [each for each in value if each not in TARGETS]:
            found.lost.append(f"{name}={value}: {', '.join(unknown)} is no target; name targets, such as q_proj")
        else:
            found.put(key, value, name)

    return put


def drop_adapter_of_full_runs(found: Translation, *, is_adapted: bool) -> None:
    """Drops the adapter of a run that trains all weights."""
    if not is_adapted:
        found.drop("adapter")


def finish_loss(found: Translation) -> None:
    """Drops what the loss does not use, and notes the records it needs."""
    function = found.get("loss.function")
    if function is None:
        found.drop("loss.options")
        return
    taken: Mapping[str, tuple[str, ...]] = {
        "dpo": ("beta", "label_smoothing"),
        "ipo": ("beta",),
        "kto": ("beta", "desirable_weight", "undesirable_weight"),
        "orpo": ("beta",),
        "simpo": ("beta", "gamma", "label_smoothing"),
        "reward_model": ("center_rewards_coefficient",),
    }
    if function not in taken:
        return
    for option in list(found.get("loss.options") or {}):
        if option not in taken[function]:
            found.drop(f"loss.options.{option}")
    found.drop("data.format")
    found.drop("data.loss_on")
    if found.get("data.packing.batch") == "rows":
        name = found.origins["data.packing"]
        found.drop("data.packing", is_named=False)
        found.notes.append(f"{name}: samples are not packed, since rows would split the pairs of {function}")
    _drop_dropout(found, f"loss.function={function} sees the model twice in a step, without dropout")
    found.notes.append("records are pairs of prompt, chosen and rejected, or prompt, completion and label for kto")


def _drop_dropout(found: Translation, why: str) -> None:
    if found.get("adapter.dropout"):
        found.lost.append(f"{found.origins['adapter.dropout']}={found.get('adapter.dropout')}: {why}")
        found.drop("adapter.dropout", is_named=False)


def finish(found: Translation, run: Settings) -> None:
    """Ends the translation of a run on records: drops unused keys, and names everything given."""
    if found.get("data.kind") is None:
        found.put("data.kind", "sft", f"{found.program} reads records")
    if found.get("data.kind") == "sft":
        found.notes.append("a sample has up to data.seq_length + 1 tokens here, the last of which is only predicted")
    finish_loss(found)
    if found.get("adapter.kind") == "dora":
        _drop_dropout(found, "adapter.kind=dora has no dropout")
    split = found.get("data.split")
    if not found.get("data.valid") and not (split and split[1]):
        found.drop("valid")
    found.names_all_of(run.given)


def put_whole_batch(found: Translation, run: Settings, names: tuple[str, ...], *, is_of_one_rank: bool) -> None:
    """Puts the samples of a step: the product of the keys `names`.

    Args:
        names: Keys of a rank's batch, its accumulation, and numbers of ranks.
        is_of_one_rank: Whether the product omits the data-parallel ranks, whose number is unknown.
    """
    is_given = any(name in run.given for name in names)
    size = math.prod(int(number(run[name])) for name in names)
    found.put("train.global_batch_size", size, " x ".join(names) if is_given else run.origin(*names))
    if is_of_one_rank:
        found.notes.append(
            f"train.global_batch_size={size} is that of one data-parallel rank: multiply it by their number"
        )


def permit_layout_dependent(found: Translation) -> None:
    """Permits layout-dependent keys that the original has."""
    for key in LAYOUT_DEPENDENT_KEYS:
        if found.get(key):
            found.put("loss.allow_layout_dependent", True, f"{key} depends on the layout by definition")


def is_on(run: Settings, name: str) -> bool:
    return run[name] is not None and is_same(run[name], True)


COMMON: Mapping[str, Callable[..., Any]] = {
    "above_0": above_0,
    "boolean": boolean,
    "files_of": files_of,
    "folder_of": folder_of,
    "held_out": held_out,
    "number": number,
    "optimizer_of": optimizer_of,
    "packing_of": packing_of,
    "pattern_of": pattern_of,
    "recomputed": recomputed,
    "reward_model": reward_model,
    "saved": saved,
    "schedule_of": schedule_of,
    "targets": targets,
    "text": str,
    "trackers": trackers,
    "unless_0": unless_0,
}
"""Functions that the tables of several programs name."""
