"""Translation of axolotl's configuration files.

Source: axolotl 0.19.0, axolotl/utils/schemas and axolotl/core/builders.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mtrain.config.foreign.hf_trainer import put_schedule
from mtrain.config.foreign.images import Part, Parts, all_trained, put_images
from mtrain.config.foreign.objectives import PREFERENCES, put_likelihood, put_loss_of_pairs
from mtrain.config.foreign.reading import Form, read_settings, without_unknown
from mtrain.config.foreign.sharding import CHECKS, put_sharding
from mtrain.config.foreign.trainers import (
    COMMON,
    drop_adapter_of_full_runs,
    finish,
    is_on,
    last_rate,
    put_best,
    put_interval,
    put_length,
    put_project,
    put_whole_batch,
    targets,
)
from mtrain.config.foreign.translation import Settings, Translation, above_0, rows_of, translated
from mtrain.config.foreign.values import boolean, listed, mapping, number
from mtrain.config.schema.adapter import ALL_LINEAR
from mtrain.config.tables import table

_FORMS = {
    "chat_template": "messages",
    "chat_template.default": "messages",
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "completion": "text",
    "pretrain": "text",
}
_OF_MESSAGES = {
    "messages": ("messages", {"role": "role", "content": "content"}),
    "sharegpt": ("conversations", {"role": "from", "content": "value"}),
}
"""Record format -> its key of the messages, and the keys of a message in axolotl."""
_SOURCES_OF_ROLES = {
    "user": {"human", "user"},
    "assistant": {"gpt", "assistant"},
    "system": {"system"},
    "tool": {"tool"},
}
"""Role -> its names in records, in axolotl and here."""
_SAME_OF_DATASETS: Mapping[str, tuple[Any, ...]] = {
    "split": ("train",),
    "ds_type": ("json", "parquet", "arrow"),
    "roles_to_train": (["assistant"], ["assistant", "gpt"]),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "trust_remote_code": (True, False),
    "chat_template": ("tokenizer_default",),
    "drop_system_message": (False,),
    "shards": (1,),
    "field_tools": ("tools",),
    "field_thinking": ("reasoning_content", "thinking", "reasoning"),
    "template_thinking_key": ("reasoning_content",),
    "message_field_training": ("train",),
}
"""Key of a dataset -> values that equal mtrain's behaviour."""
_READ_OF_DATASETS = frozenset(
    ("path", "type", "field_messages", "message_property_mappings", "message_field_role", "message_field_content")
)
_OF_TEXTS = ("field", "text_column")
_ANSWERS = (("field_chosen", "chosen", "chosen"), ("field_rejected", "rejected", "rejected"))
_WITH_PROMPT = (("field_messages", "messages", "prompt"), *_ANSWERS)
_PAIRS_OF_MESSAGES = {
    "chat_template": _WITH_PROMPT,
    "chat_template.default": _WITH_PROMPT,
    "chat_template.argilla_chat": _ANSWERS,
    "chat_template.argilla": (),
}
"""Type of a preference dataset -> its settings that name columns, each with the default and our key."""
_FORMATS_OF_FILES = frozenset(("json", "parquet", "arrow", "csv", "text"))
_FILES_OF_HUB = "data.train names files; a pattern chooses those of a split: org/name/data/train-*"
_WHY_OF_DATASETS = {"name": _FILES_OF_HUB, "split": _FILES_OF_HUB, "revision": _FILES_OF_HUB}
"""Key of a dataset -> what to do instead."""


class _Records(NamedTuple):
    """Records of one dataset."""

    form: str
    """Value of data.format."""
    columns: dict[str, str]
    read: tuple[str, ...] = ()
    """Keys of the dataset that choose the columns."""


def _datasets(config: Translation, run: Settings, name: str) -> None:
    """Sets the sources that the setting `name` lists, with their format and columns."""
    sources: list[dict[str, str]] = []
    formats: set[str] = set()
    for entry in listed(run[name]):
        dataset: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {"path": entry}
        if not isinstance(dataset.get("path"), str):
            config.wrong.append(f"{name}: a dataset has no path; give it one")
            continue
        files = dataset.get("data_files") if dataset["path"] in _FORMATS_OF_FILES else None
        sources += [{"path": path} for path in listed(files or dataset["path"])]
        records = _records_of(config, dataset, name)
        formats.add(records.form)
        if records.columns:
            origin = f"{name}: {', '.join(key for key in records.read if key in dataset)}"
            config.put("data.columns", {**(config.get("data.columns") or {}), **records.columns}, origin)
        read = {*records.read, *(("data_files",) if files is not None else ())}
        config.lost += [
            f"{name}: {key}={dataset[key]}: {_WHY_OF_DATASETS.get(key, 'no key here corresponds')}"
            for key in _unread_keys(dataset)
            if key not in read
        ]
    config.put("data.kind", "sft", name)
    config.put(f"data.{'valid' if name == 'test_datasets' else 'train'}", sources, f"{name}; paths on this machine")
    if config.get("loss.function") in PREFERENCES:  # which determine the format
        return
    if len(formats) == 1:
        config.put("data.format", formats.pop(), f"{name}: type")
    elif formats:
        config.lost.append(
            f"{name}: formats {', '.join(sorted(formats))}; all sources share data.format, so convert the others"
        )


def _records_of(config: Translation, dataset: Mapping[str, Any], name: str) -> _Records:
    kind = dataset.get("type") or ("pretrain" if name == "pretraining_dataset" else "chat_template")
    if config.get("loss.function") in PREFERENCES:
        return _pairs_of(config, dataset, f"{name}: type={kind}", str(kind))
    form = _FORMS.get(kind) if isinstance(kind, str) else None
    if form is None:
        config.lost.append(f"{name}: type={kind}; data.format is one of {', '.join(dict.fromkeys(_FORMS.values()))}")
        return _Records("auto", {})
    if form == "text":
        _cut_texts(config, f"{name}: type={kind}", is_overlapping=kind == "pretrain")
        column = dataset.get("text_column" if name == "pretraining_dataset" else "field") or "text"
        return _Records("text", {} if column == "text" else {column: "text"}, _OF_TEXTS)
    return _conversations_of(config, dataset, name, kind) if form in _OF_MESSAGES else _Records(form, {})


def _cut_texts(config: Translation, origin: str, *, is_overlapping: bool) -> None:
    """Sets what becomes of long texts, which axolotl cuts into pieces before it drops long samples."""
    config.drop("data.too_long", is_named=False)
    config.put("data.too_long", "split", origin)
    if is_overlapping:
        config.notes.append(f"{origin}: the pieces of a long text share up to 256 tokens there, and one token here")


def _pairs_of(config: Translation, dataset: Mapping[str, Any], origin: str, kind: str) -> _Records:
    """Returns the columns of a preference dataset, which axolotl names if it renders the records by a template."""
    if kind not in _PAIRS_OF_MESSAGES or config.get("loss.function") == "kto":
        config.lost.append(
            f"{origin}: axolotl's own text of prompts and answers; here the tokenizer's template renders messages"
        )
        return _Records("auto", {})
    mappings = dataset.get("message_property_mappings") or {}
    if any(part != key for part, key in mappings.items()):
        config.lost.append(f"{origin}: message_property_mappings={mappings}: messages of pairs have role and content")
    fields = {dataset.get(field) or usual: key for field, usual, key in _PAIRS_OF_MESSAGES[kind]}
    columns = {field: key for field, key in fields.items() if field != key}
    return _Records("auto", columns, tuple(field for field, _, _ in _PAIRS_OF_MESSAGES[kind]))


def _conversations_of(config: Translation, dataset: Mapping[str, Any], name: str, kind: str) -> _Records:
    form = _FORMS[kind]
    old = {part: dataset.get(f"message_field_{part}") for part in ("role", "content")}
    roles = {"role": "role", "content": "content"} if form == "messages" else _OF_MESSAGES[form][1]
    roles |= {part: key for part, key in old.items() if key} | (dataset.get("message_property_mappings") or {})
    form = next((candidate for candidate, (_, known) in _OF_MESSAGES.items() if known == roles), "")
    if not form:
        config.lost.append(
            f"{name}: message_property_mappings={roles}: messages have role and content, or from and value"
        )
        return _Records("auto", {})
    field = dataset.get("field_messages") or ("messages" if kind.startswith("chat_template") else "conversations")
    key = _OF_MESSAGES[form][0]
    return _Records(form, {} if field == key else {field: key}, ("field_messages",))


def _unread_keys(dataset: Mapping[str, Any]) -> Iterator[str]:
    for key, value in dataset.items():
        is_same = value in _SAME_OF_DATASETS.get(key, ()) or (key == "roles" and _has_our_roles(value))
        if key not in _READ_OF_DATASETS and value not in (None, "", [], {}) and not is_same:
            yield key


def _has_our_roles(roles: Any) -> bool:
    return isinstance(roles, Mapping) and all(
        set(listed(sources)) <= _SOURCES_OF_ROLES.get(role, set()) for role, sources in roles.items()
    )


def _template(config: Translation, value: Any, name: str) -> None:
    """Sets the tokenizer's own template; axolotl's templates of other names are files of its own."""
    if value == "tokenizer_default":
        config.put("data.chat_template", "auto", f"{name}={value}")
    elif value != "jinja":  # chat_template_jinja names the file
        config.notes.append(
            f"{name}={value}: axolotl's own template of this name is not used; data.chat_template=auto is the "
            "tokenizer's, and the path of a .jinja file is another"
        )


def _special_tokens(config: Translation, value: Mapping[str, Any], name: str) -> None:
    """Reports special tokens that change the tokenizer's, except padding, which is never in the loss."""
    changed = {role: text for role, text in value.items() if role != "pad_token" and text}
    if changed:
        config.lost.append(f"{name}={changed}: the tokenizer's own tokens are used; change its tokenizer_config.json")


def _tokens(config: Translation, value: Any, name: str) -> None:
    """Sets added tokens; a mapping is an old form of special_tokens."""
    if isinstance(value, Mapping):
        _special_tokens(config, value, name)
    else:
        config.put("model.add_tokens", value, name)


def _adapter(config: Translation, value: Any, name: str) -> None:
    if value not in ("lora", "qlora"):
        raise ValueError(f"{value!r} is not a kind of adapter")
    config.put("adapter.kind", "lora", name)
    if value == "qlora":
        config.lost.append(f"{name}=qlora: 4-bit weights; adapter.base_dtype=bf16 halves the memory of float32 weights")


def _dora(config: Translation, value: Any, name: str) -> None:
    if boolean(value):
        config.drop("adapter.kind")
        config.put("adapter.kind", "dora", name)


def _wandb(config: Translation, value: Any, name: str) -> None:
    config.put("metrics.project", value, name)
    config.put("metrics.trackers", ["wandb"], name)


_SAME_PLUGINS = ("liger", "cut_cross_entropy", "kernels", "lm_eval")
"""Packages of plugins that compute the same, or only after the run."""


def _plugins(config: Translation, value: Any, name: str) -> None:
    others = [str(each) for each in listed(value) if not any(f".{same}." in str(each) for same in _SAME_PLUGINS)]
    if others:
        config.lost.append(f"{name}={', '.join(others)}: the code of a plugin is not read; see docs/extending")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **COMMON,
    **CHECKS,
    "any": lambda value: value,
    "mapping": mapping,
    "template": _template,
    "plugins": _plugins,
    "special_tokens": _special_tokens,
    "tokens": _tokens,
    "adapter": _adapter,
    "dora": _dora,
    "wandb": _wandb,
    "all_linear": lambda config, value, name: targets(config, ALL_LINEAR, name) if boolean(value) else None,
    "precision": lambda value: value in ("auto", "full") or boolean(value),
    "above_0_or_4": lambda value: above_0(value or 4),
    "number_or_1": lambda value: number(value) or 1.0,
}
_TRACKERS = (
    ("swanlab", "swanlab_project", "swanlab_experiment_name"),
    ("mlflow", "mlflow_experiment_name", "mlflow_run_name"),
    ("trackio", "trackio_project_name", "trackio_run_name"),
    ("comet_ml", "comet_project_name", None),
)
"""Trackers, each with the settings that name the project and the run."""
AXOLOTL = rows_of(table("axolotl"), _FUNCTIONS)


def from_axolotl(words: Sequence[str]) -> Translation:
    """Translates a configuration file of axolotl, and arguments `--name value`; skips `axolotl train`.

    Raises:
        ConfigError: The file cannot be read, or nothing is given.
    """
    config = Translation("axolotl")
    given = read_settings(config, words, Form(AXOLOTL, ("train",)))
    run = translated(config, without_unknown(config, given.settings), AXOLOTL)
    for setting in ("datasets", "pretraining_dataset", "test_datasets"):
        if run[setting] is not None:
            _datasets(config, run, setting)
    put_length(config, run, "max_steps", "num_epochs")
    put_interval(config, run, "save_steps", "checkpoint.interval_steps")
    put_interval(config, run, "eval_steps", "valid.interval_steps")
    if run["profiler_steps"] is not None and (count := int(number(run["profiler_steps"]))) > 0:
        first = 1 if run["profiler_steps_start"] is None else 1 + int(number(run["profiler_steps_start"]))
        config.put("metrics.profile_steps", [first, first + count - 1], "profiler_steps_start, profiler_steps")
    put_best(config, run, "early_stopping_patience")
    for tracker, project, name in _TRACKERS:
        put_project(config, run, tracker, project, name)
    if run["dpo_loss_type"] is not None and config.get("loss.function") == "dpo":
        put_loss_of_pairs(config, run["dpo_loss_type"], "dpo_loss_type")
    for put in (_warmup, _rates, _batch, _precision, _simpo):
        put(config, run)
    put_sharding(config, run, needs_switch=False)
    drop_adapter_of_full_runs(config, is_adapted=run["adapter"] is not None)
    _images(config, run)
    finish(config, run)
    return config


def _images(config: Translation, run: Settings) -> None:
    """Sets what is trained of a model that reads images: all of it, unless freeze_mm_modules is on."""
    signals = ("processor_type", "image_size", "image_resize_algorithm", "freeze_mm_modules")
    parts = all_trained(run, ("processor_type",))
    if is_on(run, "freeze_mm_modules"):
        frozen = Part(True, run.described("freeze_mm_modules"))
        parts = Parts(frozen, frozen, parts.freeze_language_model)
    put_images(config, run, parts, signals)


def _warmup(config: Translation, run: Settings) -> None:
    """Sets the warm-up; axolotl's default is 3 %, at most 100 steps, and axolotl turns one step into two."""
    steps, ratio, whole = run["warmup_steps"], run["warmup_ratio"], config.get("train.num_steps")
    names = ("warmup_steps", "warmup_ratio")
    if steps is not None and not 0 < number(steps) < 1:
        count = int(number(steps))
    elif steps is not None:
        config.put("optimizer.warmup_ratio", steps, run.origin(*names))
        return
    elif isinstance(whole, int):
        count = int(0.03 * whole) if ratio is None else int(number(ratio) * whole)
        count = min(count, 100) if ratio is None else count
    else:
        config.put("optimizer.warmup_ratio", 0.03 if ratio is None else ratio, run.origin(*names))
        config.notes.append(
            "a warm-up by share is rounded down in axolotl, and up here; without warmup_ratio axolotl has at most 100 "
            "steps"
        )
        return
    config.put("optimizer.warmup_steps", 2 if count == 1 else count, run.origin(*names))


def _rates(config: Translation, run: Settings) -> None:
    """Sets the schedule of transformers, in which axolotl gives cosine a final rate."""
    put_schedule(config, run, "lr_scheduler")
    if run["lr_scheduler"] == "cosine" and run["cosine_min_lr_ratio"] is not None:
        last_rate(config, run["cosine_min_lr_ratio"], "cosine_min_lr_ratio")


def _batch(config: Translation, run: Settings) -> None:
    sizes = {name: int(number(run[name])) for name in ("dp_shard_size", "dp_replicate_size") if run[name]}
    put_whole_batch(config, run, ("micro_batch_size", "gradient_accumulation_steps", *sizes), is_of_one_rank=not sizes)
    if len(sizes) == 1:
        config.notes.append(
            f"{next(iter(sizes))} is assumed to be the number of data-parallel ranks; if you start more, multiply "
            "train.global_batch_size"
        )


def _simpo(config: Translation, run: Settings) -> None:
    """Sets the defaults for SimPO of TRL's CPO trainer."""
    if config.get("loss.function") == "simpo":
        config.put("loss.options.beta", 0.1, "axolotl's default of rl_beta")
        put_likelihood(config, run)


def _precision(config: Translation, run: Settings) -> None:
    names = ("bf16", "fp16", "bfloat16", "float16")
    is_16 = is_on(run, "fp16")
    is_brain = not is_16 if run["bf16"] == "auto" else run["bf16"] == "full" or is_on(run, "bf16")
    is_brain |= is_on(run, "bfloat16")
    is_16 |= is_on(run, "float16")
    config.put("train.precision", "bf16" if is_brain else "fp16" if is_16 else "fp32", run.described(*names))
    if is_brain and run["adapter"] is None:
        config.notes.append(
            "axolotl's weights are bfloat16, unless FSDP keeps float32 ones; here main weights are float32"
        )
