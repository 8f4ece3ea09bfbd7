"""Translation of files and arguments of LLaMA-Factory.

Source: LLaMA-Factory 0.9.5, src/llamafactory/hparams and data; transformers 5.24.0.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.config.foreign.hf_trainer import FUNCTIONS, TRAINER, put_parallelism, put_trainer
from mtrain.config.foreign.images import Part, Parts, put_images, put_limits
from mtrain.config.foreign.objectives import put_loss_of_pairs
from mtrain.config.foreign.reading import Form, comma_list, json_or_yaml, read_settings, without_unknown
from mtrain.config.foreign.trainers import (
    drop_adapter_of_full_runs,
    finish,
    is_on,
    put_best,
    put_project,
    saved,
    targets,
)
from mtrain.config.foreign.translation import Put, Settings, Translation, rows_of, translated
from mtrain.config.foreign.values import boolean, number
from mtrain.config.schema.adapter import ALL_LINEAR
from mtrain.config.tables import table

_STAGES = {"sft": None, "pt": None, "rm": "reward_model", "dpo": "dpo", "kto": "kto"}
"""Stage -> loss function; None: the loss of tokens."""
_PREFERENCES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_USUAL_COLUMNS = {
    "alpaca": {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "history": "history",
        "system": "system",
        "images": "images",
    },
    "sharegpt": {"messages": "conversations", "tools": "tools", "system": "system", "images": "images"},
    "openai": {"messages": "messages", "tools": "tools", "images": "images"},
    "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "unpaired_preference": {"prompt": "prompt", "response": "completion", "kto_tag": "label"},
    "text": {"prompt": "text"},
}
"""Format of a dataset -> its columns in dataset_info.json -> our keys of a record."""
_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}


def _template(config: Translation, value: Any, name: str) -> None:
    config.notes.append(
        f"{name}={value}: LLaMA-Factory's own template of this name is not used; data.chat_template=auto is the "
        "tokenizer's"
    )


def _thinking(config: Translation, value: Any, name: str) -> None:
    """Turns thinking off in the template if the setting is off; templates of reasoning models think by default."""
    if value == "null":
        config.lost.append(f"{name}=null: data.chat_template_kwargs={{enable_thinking: false}} turns thinking off")
    elif not boolean(value):
        config.put("data.chat_template_kwargs", {"enable_thinking": False}, name)


def _stage(config: Translation, value: Any, name: str) -> None:
    if value == "ppo":
        config.wrong.append(
            f"{name}=ppo: this needs a loop in Python; see docs/training/rl.md and examples/grpo_loop.py"
        )
        return
    config.put("data.kind", "sft", name if config.is_default(name) else f"{name}={value}")
    if (function := _STAGES[value]) is not None:
        config.put("loss.function", function, f"{name}={value}")
        if value == "rm":
            config.put("model.num_labels", 1, f"{name}={value}")


def _method(config: Translation, value: Any, name: str) -> None:
    if value not in ("lora", "full", "freeze", "oft"):
        raise ValueError(f"{value!r} is not a way of finetuning")
    if value == "lora":
        config.put("adapter.kind", "lora", name if config.is_default(name) else f"{name}={value}")
    elif value != "full":
        config.lost.append(f"{name}={value}: all weights are trained here, unless adapter.kind is lora or dora")


def _lora_targets(config: Translation, value: Any, name: str) -> None:
    targets(config, ALL_LINEAR if value == "all" else comma_list(value), name)


def _dora(config: Translation, value: Any, name: str) -> None:
    if boolean(value):
        config.drop("adapter.kind")
        config.put("adapter.kind", "dora", name)


def _one_adapter(config: Translation, value: Any, name: str) -> None:
    first, *others = comma_list(value)
    config.put("adapter.path", first, name)
    if others:
        config.lost.append(f"{name}={value}: adapter.path is one adapter; merge the others with mtrain convert")


def _tokens(key: str) -> Put:
    return lambda config, value, name: config.put(key, comma_list(value), name)


def _not_recomputed(config: Translation, value: Any, name: str) -> None:
    config.put("train.recompute", "none" if boolean(value) else "full", name)


def _dft(config: Translation, value: Any, name: str) -> None:
    if boolean(value):
        config.put("loss.function", "dft", name)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **FUNCTIONS,
    "template": _template,
    "thinking": _thinking,
    "stage": _stage,
    "method": _method,
    "lora_targets": _lora_targets,
    "dora": _dora,
    "one_adapter": _one_adapter,
    "tokens": _tokens,
    "saved_list": lambda config, value, name: saved(config, comma_list(value), name),
    "not_recomputed": _not_recomputed,
    "dft": _dft,
}
LLAMAFACTORY = {**rows_of(TRAINER, _FUNCTIONS), **rows_of(table("llamafactory"), _FUNCTIONS)}
"""Argument of LLaMA-Factory -> treatment."""


def from_llamafactory(words: Sequence[str]) -> Translation:
    """Translates files (YAML, JSON) and arguments, `--name value` or `name=value`; skips `llamafactory-cli train`.

    Raises:
        ConfigError: A file cannot be read, or nothing is given.
    """
    config = Translation("LLaMA-Factory")
    given = read_settings(config, words, Form(LLAMAFACTORY, ("train",)))
    run = translated(config, without_unknown(config, given.settings), LLAMAFACTORY)
    for put in (_data, _packing, _preference, put_trainer, _precision, _adapter, put_parallelism, _images, _tracked):
        put(config, run)
    finish(config, run)
    return config


def _tracked(config: Translation, run: Settings) -> None:
    """Sets early stopping, and the project of the tracker that has its own arguments."""
    put_best(config, run, "early_stopping_steps")
    put_project(config, run, "swanlab", "swanlab_project", "swanlab_run_name")


_FREEZES = ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")
_SIZES = ("image_min_pixels", "image_max_pixels")


def _images(config: Translation, run: Settings) -> None:
    """Sets what is trained of a model that reads images, and the sizes of images."""
    parts = Parts(*(Part(is_on(run, name), run.described(name)) for name in _FREEZES))
    info = _described(run)[1]
    names = [name for key in ("dataset", "eval_dataset") if run[key] is not None for name in comma_list(run[key])]
    has_images = any("images" in ((info.get(name) or {}).get("columns") or {}) for name in names)
    if not put_images(config, run, parts, (*_FREEZES, *_SIZES, *(["dataset"] if has_images else []))):
        return
    put_limits(config, *((run[name], run.described(name)) for name in _SIZES))
    is_split = config.get("adapter.kind") is None and parts.freeze_tower.is_frozen != parts.freeze_projector.is_frozen
    if is_split:
        config.notes.append(
            "deepstack_merger_list of Qwen3-VL is part of the tower in LLaMA-Factory, and of the projector here"
        )


def _described(run: Settings) -> tuple[str, Mapping[str, Any]]:
    """Returns the folder of the datasets, and their descriptions by name."""
    folder = run["dataset_dir"]
    if isinstance(folder, Mapping):
        return "data", folder
    folder = "data" if folder is None else str(folder)
    return folder, json_or_yaml(Path(folder, "dataset_info.json"))


class _Dataset(NamedTuple):
    path: str
    format: str | None
    """None: unknown."""
    columns: dict[str, str]
    """Column of the file -> our key, where they differ."""


def _data(config: Translation, run: Settings) -> None:
    """Sets files, format and columns from dataset_info.json."""
    folder, info = _described(run)
    for name, key in (("dataset", "data.train"), ("eval_dataset", "data.valid")):
        if run[name] is None:
            continue
        datasets = [_dataset(config, run, entry, folder, info) for entry in comma_list(run[name])]
        config.put(key, [{"path": dataset.path} for dataset in datasets], f"{name}; paths on this machine")
        formats = {dataset.format for dataset in datasets} - {None}
        if len(formats) == 1:
            config.put("data.format", formats.pop(), f"{name}, dataset_info.json")
        elif formats:
            config.lost.append(f"{name}: formats {', '.join(map(str, formats))}: all sources share data.format")
        columns = {column: ours for dataset in datasets for column, ours in dataset.columns.items()}
        config.put("data.columns", columns or None, f"{name}, dataset_info.json")


def _dataset(config: Translation, run: Settings, name: str, folder: str, info: Mapping[str, Any]) -> _Dataset:
    entry = info.get(name)
    if entry is None:
        path = str(Path(folder, f"{name}.json"))
        config.notes.append(
            f"dataset {name}: {folder}/dataset_info.json does not describe it on this machine; {path} is assumed"
        )
        return _Dataset(path, "text" if run["stage"] == "pt" else None, {})
    urls = [str(entry[key]) for key in ("hf_hub_url", "ms_hub_url", "om_hub_url") if key in entry]
    path = urls[0] if urls else str(Path(folder, str(entry.get("file_name", name))))
    config.lost += [
        f"dataset {name}: {key}={entry[key]}: data.train names files, which you choose from the dataset"
        for key in ("subset", "split", "folder", "num_samples", "script_url", "cloud_file_name")
        if entry.get(key) not in (None, "train")
    ]
    kind = entry.get("formatting", "alpaca")
    tags = entry.get("tags") or {}
    if kind == "sharegpt" and (tags.get("role_tag"), tags.get("content_tag")) == ("role", "content"):
        kind, tags = "openai", {}
    if changed := {tag: text for tag, text in tags.items() if text not in _USUAL_TAGS}:
        config.lost.append(f"dataset {name}: tags {changed}: messages have from and value, or role and content")
    form = {"pt": "text", "kto": "unpaired_preference"}.get(str(run["stage"]), _FORMATS.get(kind))
    form = "preference" if entry.get("ranking") else form
    usual = _USUAL_COLUMNS[form if form in _USUAL_COLUMNS else kind]
    columns = {column: usual[part] for part, column in (entry.get("columns") or {}).items() if part in usual}
    config.lost += [
        f"dataset {name}: the column {part}={column} has no key of a record here"
        for part, column in (entry.get("columns") or {}).items()
        if part not in usual
    ]
    return _Dataset(path, form, {column: ours for column, ours in columns.items() if column != ours})


_USUAL_TAGS = ("from", "value", "human", "gpt", "observation", "function_call", "system", "user", "assistant")


def _packing(config: Translation, run: Settings) -> None:
    """Sets packing, and what happens to samples that are too long."""
    is_text = run["stage"] == "pt"
    is_packed = is_on(run, "packing") or is_on(run, "neat_packing") or (is_text and run["packing"] is None)
    origin = run.origin("packing", "neat_packing")
    if not is_packed:
        if not is_text:
            config.notes.append("samples above cutoff_len lose tokens of prompt and answer there, and their end here")
        return
    config.put("data.packing", {"batch": "rows"}, origin)
    if is_text:
        config.put("data.too_long", "split", origin)
        config.notes.append(
            "stage=pt joins texts and cuts them into rows; here a row holds whole texts; `mtrain tokenize` and "
            "data.kind=indexed do the same"
        )
        return
    config.put("data.too_long", "drop", f"{origin}, which drops samples above cutoff_len")
    if not is_on(run, "neat_packing"):
        config.notes.append("packing without neat_packing lets the samples of a row see each other; here they never do")


def _preference(config: Translation, run: Settings) -> None:
    if config.get("loss.function") not in ("dpo", "kto"):
        return
    config.put("loss.options.beta", number(run["pref_beta"]), run.origin("pref_beta"))
    if config.get("loss.function") == "dpo":
        put_loss_of_pairs(config, run["pref_loss"], "pref_loss", _PREFERENCES)


def _precision(config: Translation, run: Settings) -> None:
    """Replaces the default float32: without bf16 and fp16 the program computes in the model's own type."""
    if is_on(run, "pure_bf16"):
        config.notes.append("pure_bf16=true: weights and moments are bfloat16 there; here they are float32")
    elif is_on(run, "bf16") or is_on(run, "fp16"):
        return
    else:
        config.notes.append("without bf16 and fp16 LLaMA-Factory computes in the model's own type, mostly bfloat16")
    origin = run.origin("pure_bf16") if is_on(run, "pure_bf16") else run.described("bf16", "fp16")
    config.drop("train.precision", is_named=False)
    config.put("train.precision", "bf16", origin)


def _adapter(config: Translation, run: Settings) -> None:
    is_adapted = run["finetuning_type"] == "lora"
    if is_adapted and run["lora_alpha"] is None:
        config.put(
            "adapter.alpha", 2 * number(run["lora_rank"]), f"{config.program}'s default of lora_alpha, twice the rank"
        )
    elif is_adapted:
        alpha = number(run["lora_alpha"])
        # LLaMA-Factory takes 0 for its default
        config.put("adapter.alpha", 2 * number(run["lora_rank"]) if alpha == 0 else alpha, run.origin("lora_alpha"))
    if config.get("layout.tp") in (None, 1):
        config.drop("layout.sp")
    drop_adapter_of_full_runs(config, is_adapted=is_adapted)
