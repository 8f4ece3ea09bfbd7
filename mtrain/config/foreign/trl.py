"""Translation of arguments and files of TRL's trainers and of transformers' Trainer, with accelerate's file.

Source: TRL 1.16.0, transformers 5.24.0 and accelerate 1.15.0.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.hf_trainer import FUNCTIONS, TRAINER, accelerate_settings, put_parallelism, put_trainer
from mtrain.config.foreign.images import all_trained, put_images
from mtrain.config.foreign.objectives import aggregate_as_main, put_likelihood, put_loss_of_pairs, reward_model
from mtrain.config.foreign.reading import Form, Given, options, read_settings, without_unknown
from mtrain.config.foreign.trainers import drop_adapter_of_full_runs, files_of, finish, is_on, put_best, targets
from mtrain.config.foreign.translation import Row, Settings, Translation, deferred, rows_of, translated
from mtrain.config.foreign.values import is_same, listed, number
from mtrain.config.load import read_mapping
from mtrain.config.tables import table

_PAIRS = ("dpo", "kto", "reward", "orpo", "cpo")
KINDS = ("sft", *_PAIRS, "grpo")
"""Trainers of TRL that are translated, as `trl KIND` names them."""
_OTHER_KINDS = ("rloo", "distillation", "ppo", "online_dpo", "gkd", "nash_md", "xpo", "bco", "prm")
TRANSFORMERS = "trainer"
"""Name for transformers' own Trainer."""
_PROFILES = {f"zero{stage}": {"deepspeed_config": {"zero_stage": stage}} for stage in (1, 2, 3)} | {
    f"fsdp{version}": {"distributed_type": "FSDP", "mixed_precision": "bf16"} for version in (1, 2)
}
"""Profile of `trl --accelerate_config` -> keys of its file."""
_OF_PEFT = ["q_proj", "v_proj"]
"""PEFT's targets for the families of Llama, Mistral and Qwen."""


def _length(config: Translation, value: Any, name: str) -> None:
    if value == "null":
        config.notes.append(f"{name}=null: samples have any length there; data.seq_length is the longest one here")
    else:
        config.put("data.seq_length", value, name)


def _text_column(config: Translation, value: Any, name: str) -> None:
    if value != "text":
        config.put("data.columns", {value: "text"}, name)


def _datasets(config: Translation, value: Any, name: str) -> None:
    paths = []
    for entry in listed(value):
        dataset: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {"path": entry}
        paths += listed(dataset.get("data_files") or dataset["path"])
        config.lost += [
            f"{name}: {key}={setting}: data.train names files, which you choose from the dataset"
            for key, setting in dataset.items()
            if key not in ("path", "data_files") and setting not in (None, "train")
        ]
    files_of("data.train")(config, paths, name)


def _mixture(config: Translation, value: Mapping[str, Any], name: str) -> None:
    """Sets the sources of alignment-handbook's dataset_mixture."""
    weights = [entry.get("weight") for entry in value["datasets"]]
    sources = [
        {"path": entry["id"], "weight": 1.0 if weight is None else float(weight)}
        for entry, weight in zip(value["datasets"], weights, strict=True)
    ]
    config.put("data.kind", "sft", name)
    config.put("data.train", sources, f"{name}: id, weight; paths on this machine")
    said = [
        f"{key}={entry[key]}" for entry in value["datasets"] for key in ("config", "split", "columns") if entry.get(key)
    ]
    said += [f"{key}={value[key]}" for key in value if key != "datasets"]
    if said:
        config.lost.append(f"{name}: {', '.join(said)}: data.train names files, and data.split their shares")


def _kto_loss(config: Translation, value: Any, name: str) -> None:
    put_loss_of_pairs(config, value, name, {"kto": "kto"})


def _kto_order(config: Translation, value: Any, name: str) -> None:
    line = f"{name}={value}: the order of samples always follows from train.seed"
    if value == "sequential":
        config.notes.append(line)
    elif value != "random":
        config.lost.append(line)


def _cpo_loss(config: Translation, value: Any, name: str) -> None:
    if value == "simpo":
        config.put("loss.function", "simpo", f"{name}=simpo")
    else:
        config.wrong.append(
            f"{name}={value}: CPO's own loss has no equivalent here; loss.function=simpo and dpo are the nearest"
        )


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **FUNCTIONS,
    "length": _length,
    "text_column": _text_column,
    "datasets": _datasets,
    "mixture": _mixture,
    "dpo_loss": put_loss_of_pairs,
    "kto_loss": _kto_loss,
    "kto_order": _kto_order,
    "cpo_loss": _cpo_loss,
}
_PARTS = {name: rows_of(content, _FUNCTIONS) for name, content in table("trl").items()}


def rows_of_kind(kind: str) -> dict[str, Row]:
    """Returns the rows of a trainer in `KINDS`, or of transformers' own; the latter without TRL's defaults."""
    rows = rows_of(TRAINER, _FUNCTIONS)
    if kind == TRANSFORMERS:
        return {**{name: Row(row.put) for name, row in _PARTS["of_all"].items()}, **rows}
    pairs = _PARTS["pairs"] if kind in _PAIRS else {}
    rows |= _PARTS["of_all"]
    if kind == "grpo":  # has no such argument, and so no default of it
        rows["max_length"] = Row(rows["max_length"].put)
    return {**rows, **pairs, **_PARTS[kind], "num_processes": deferred(number)}


def from_trl(words: Sequence[str]) -> Translation:
    """Translates arguments, files of arguments and accelerate's file for a trainer of TRL or transformers.

    Args:
        words: Arguments and files; the trainer's name comes before them, as in `trl sft ...` or `python dpo.py ...`,
            or follows from the arguments.

    Raises:
        ConfigError: A file cannot be read, nothing is given, or the trainer is unknown.
    """
    config = Translation("TRL")
    switches = {name for kind in (*KINDS, TRANSFORMERS) for name in rows_of_kind(kind)}
    commands = (*KINDS, *_OTHER_KINDS, TRANSFORMERS)
    given = read_settings(config, words, Form(switches, commands, is_aside=_is_of_accelerate))
    kind = _kind(given, words)
    settings = {**given.settings, **_accelerated(config, given)}
    run = translated(config, without_unknown(config, settings), rows_of_kind(kind))
    if kind == TRANSFORMERS:
        config.program = "transformers"
    config.notes.append(
        f"the arguments are read as those of {'transformers' if kind == TRANSFORMERS else 'trl'} {kind}"
    )
    put_trainer(config, run)
    _adapter(config, run)
    put_parallelism(config, run)
    put_images(config, run, all_trained(run), ())
    put_best(config, run, None)
    if config.get("valid.interval_steps") and not config.get("data.valid"):
        config.lost.append(f"{run.described('eval_strategy')}: name the file of the dataset's test split in data.valid")
        config.drop("valid", is_named=False)
    match kind:
        case "grpo":
            _policy(config, run)
        case "sft":
            _records(config, run)
        case "reward":
            reward_model(config, True, "TRL's reward trainer")
        case "orpo":
            config.put("loss.function", "orpo", "TRL's ORPO trainer")
        case "cpo" if config.get("loss.function") == "simpo":
            put_likelihood(config, run)
    if is_same(run["dtype"] if "torch_dtype" not in run.explicit else run["torch_dtype"], "bfloat16"):
        config.notes.append("dtype=bfloat16: the weights are bfloat16 there; here main weights are float32")
    finish(config, run)
    return config


def _is_of_accelerate(content: Mapping[str, Any]) -> bool:
    return not content.keys().isdisjoint(("compute_environment", "distributed_type"))


def _accelerated(config: Translation, given: Given) -> dict[str, Any]:
    """Returns the settings from accelerate's file, a profile of TRL or arguments of `accelerate launch`."""
    launcher = {name: values[0] for name, values in options(given.command, str)[0].items() if values}
    if "accelerate" not in given.command:
        launcher = {}
    path = str(launcher.pop("config_file", None) or given.settings.get("accelerate_config") or "")
    content = {**given.aside, **(_PROFILES.get(path) or (read_mapping(Path(path)) if path else {})), **launcher}
    settings = accelerate_settings(config, content) if content else {}
    for precision in ("bf16", "fp16"):
        if settings.pop(precision, False) and not any(
            is_same(given.settings.get(name), True) for name in ("bf16", "fp16")
        ):
            settings[precision] = True
            config.notes.append(f"mixed_precision={precision} of accelerate is used as {precision}=true")
    return settings


def _kind(given: Given, words: Sequence[str]) -> str:
    """Returns the trainer: by its name, by arguments that only one of them has, or by the folders of the files."""
    named = {part for word in given.command for part in Path(word).stem.replace("run_", "").split("_")} & {
        *KINDS,
        TRANSFORMERS,
    }
    if other := {Path(word).stem for word in given.command} & {*_OTHER_KINDS}:
        raise ConfigError(f"trl {other.pop()}: only {', '.join(KINDS)} are translated; write its configuration by hand")
    if len(named) == 1:
        return named.pop()
    shared = rows_of(TRAINER, _FUNCTIONS).keys() | _PARTS["of_all"].keys()
    own = given.settings.keys() - (shared - {"max_length"})
    known = own & set().union(*(part.keys() for part in _PARTS.values()))
    candidates = [kind for kind in KINDS if known <= rows_of_kind(kind).keys()]
    folders = {part for word in words for part in Path(word).parts}
    hinted = [kind for kind in candidates if kind in folders]
    if not given.settings.keys() - rows_of(TRAINER, _FUNCTIONS).keys():
        return TRANSFORMERS
    if "sft" in candidates and not hinted:
        return "sft"
    if len(hinted or candidates) == 1:
        return (hinted or candidates)[0]
    raise ConfigError(
        f"{', '.join(sorted(known))}: several trainers of TRL have these arguments, with different defaults; put the "
        f"name of yours before them: {', '.join(KINDS)}"
    )


def _adapter(config: Translation, run: Settings) -> None:
    is_adapted = is_on(run, "use_peft")
    if is_adapted:
        config.put("adapter.kind", "lora", "use_peft")
    if is_adapted and "lora_target_modules" not in run.explicit:
        targets(config, _OF_PEFT, "TRL's default of lora_target_modules, which is PEFT's for Llama, Mistral and Qwen")
    drop_adapter_of_full_runs(config, is_adapted=is_adapted)


def _records(config: Translation, run: Settings) -> None:
    """Sets packing, and the tokens in the loss: all tokens of conversations, unless assistant_only_loss is on."""
    strategy = run["packing_strategy"]
    if is_on(run, "packing"):
        config.put("data.packing", {"batch": "rows"}, "packing")
        if strategy in ("bfd_split", "bfd-requeue"):
            config.put("data.too_long", "split", f"packing_strategy={strategy}")
        elif strategy != "bfd":
            config.lost.append(
                f"packing_strategy={strategy}: rows contain whole samples; data.kind=indexed cuts documents"
            )
    if run["completion_only_loss"] is not None and not is_on(run, "completion_only_loss"):
        config.lost.append(
            "completion_only_loss=False: prompts are never in the loss; data.format=text trains whole texts"
        )
    if not is_on(run, "assistant_only_loss"):
        config.notes.append(
            f"{run.described('assistant_only_loss')}: all tokens of `messages` are in the loss there, and only answers "
            "here; records with prompt and completion train the same"
        )


def _policy(config: Translation, run: Settings) -> None:
    """Sets the loss of GRPO's trainer, whose samples come from a loop."""
    config.drop("train.num_epochs")
    for key in ("data.train", "data.valid", "data.kind", "data.columns"):
        config.drop(key, is_named=False)
    config.lost += [
        f"{name}={run[name]}: a loop reads prompts; samples come from rollouts"
        for name in ("dataset_name", "datasets", "dataset_mixture")
        if name in run.explicit
    ]
    config.put("data.kind", "mock", "samples come from a loop in Python: Engine.forward_backward")
    if run["max_prompt_length"] is not None:
        names = ("max_prompt_length", "max_completion_length")
        config.drop("data.seq_length")
        config.put("data.seq_length", int(sum(number(run[name]) for name in names)), run.origin(*names))
    low, high = number(run["epsilon"]), number(run["epsilon"] if run["epsilon_high"] is None else run["epsilon_high"])
    kind, level, origin = (
        run["loss_type"],
        run["importance_sampling_level"],
        run.origin("loss_type", "importance_sampling_level"),
    )
    aggregations = {
        "grpo": "seq-mean-token-mean",
        "dapo": "token-mean",
        "bnpo": "token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
        "cispo": "token-mean",
    }
    function = "cispo" if kind == "cispo" else "gspo" if level == "sequence" else "ppo"
    if kind not in aggregations or (level == "sequence" and kind != "grpo"):
        config.wrong.append(
            f"loss_type={kind}, importance_sampling_level={level}: loss.function supports ppo, gspo and cispo"
        )
        return
    if kind == "cispo":  # TRL's bound is of the ratio itself
        low, high = 1.0, high - 1
    config.put("loss.function", function, origin)
    config.put("loss.options.clip_low", low, run.origin("epsilon"))
    config.put("loss.options.clip_high", high, run.origin("epsilon_high", "epsilon"))
    config.put("loss.aggregation", aggregations[kind], origin)
    if kind == "dr_grpo":
        config.put("loss.norm_length", run["max_completion_length"], run.origin("max_completion_length"))
    if kind == "bnpo":
        config.notes.append(
            "loss_type=bnpo divides by the tokens of a microbatch; token-mean divides by those of the step"
        )
    if run["delta"] is not None and function == "ppo":
        config.put("loss.options.dual_clip", number(run["delta"]), "delta")
    _correct(config, run)
    _side_terms(config, run)


def _correct(config: Translation, run: Settings) -> None:
    """Sets the weights by which TRL corrects for the probabilities of vLLM, unless it samples by transformers."""
    prefix = "vllm_importance_sampling_"
    if not (is_on(run, "use_vllm") and is_on(run, f"{prefix}correction")):
        return
    most = f"{prefix}cap" if run[f"{prefix}cap"] is not None else f"{prefix}clip_max"
    for key, name in (("rollout_cap", most), ("rollout_floor", f"{prefix}clip_min")):
        if run[name] is not None and number(run[name]):
            config.put(f"loss.options.{key}", number(run[name]), run.origin(name))
    if config.get("loss.options.rollout_cap") or config.get("loss.options.rollout_floor"):
        kind = str(run[f"{prefix}mode"]).replace("_", "-")
        config.put("loss.options.rollout_correction", kind, run.origin(f"{prefix}mode"))


def _side_terms(config: Translation, run: Settings) -> None:
    if coefficient := number(run["beta"]):
        config.put("loss.side_terms.kl.function", "kl", "beta")
        config.put("loss.side_terms.kl.coefficient", coefficient, "beta")
        config.put("loss.side_terms.kl.options.estimator", "k3", "beta")
        aggregate_as_main(config, "kl")
        if is_on(run, "use_bias_correction_kl"):
            config.lost.append(
                f"{run.described('use_bias_correction_kl')}: the divergence is not weighted by the ratio"
            )
    if bonus := number(run["entropy_coef"]):
        config.put("loss.side_terms.entropy.function", "entropy", "entropy_coef")
        config.put("loss.side_terms.entropy.coefficient", -bonus, "entropy_coef, which is subtracted")
