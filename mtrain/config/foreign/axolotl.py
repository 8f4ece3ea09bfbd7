"""Files of axolotl as a configuration.

Source: axolotl 0.19.0, axolotl/utils/schemas and axolotl/core/builders.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mtrain.config.foreign.trainers import (
    COMMON,
    drop_adapter_of_full_runs,
    finish,
    is_on,
    last_rate,
    put_interval,
    put_length,
    put_likelihood,
    put_whole_batch,
    targets,
)
from mtrain.config.foreign.translation import Put, Settings, Translation, above_0, rows_of, translated
from mtrain.config.foreign.values import boolean, listed, number
from mtrain.config.load import read_file
from mtrain.config.schema.adapter import ALL_LINEAR
from mtrain.config.tables import table

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
    ("path", "type", "field_messages", "message_property_mappings", "message_field_role", "message_field_content")
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


def _tracker(tracker: str) -> Put:
    def put(found: Translation, value: Any, name: str) -> None:
        if boolean(value):
            found.put("metrics.trackers", [*(found.get("metrics.trackers") or []), tracker], name)

    return put


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **COMMON,
    "datasets": _datasets,
    "template": _template,
    "special_tokens": _special_tokens,
    "tokens": _tokens,
    "adapter": _adapter,
    "dora": _dora,
    "wandb": _wandb,
    "tracker": _tracker,
    "all_linear": lambda found, value, name: targets(found, ALL_LINEAR, name) if boolean(value) else None,
    "precision": lambda value: value in ("auto", "full") or boolean(value),
    "above_0_or_4": lambda value: above_0(value or 4),
    "number_or_1": lambda value: number(value) or 1.0,
}
AXOLOTL = rows_of(table("axolotl"), _FUNCTIONS)


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
            f"{next(iter(sizes))} is assumed to be the number of data-parallel ranks; if you start more, multiply "
            "train.global_batch_size"
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
        found.notes.append("weights are bfloat16 there, unless FSDP keeps float32 ones; here main weights are float32")
