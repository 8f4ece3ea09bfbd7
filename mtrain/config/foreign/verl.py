"""Translation of files and arguments of verl's trainers: supervised finetuning, and the actor of RL loops.

Source: verl 0.9.1, verl/trainer/config.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.images import Part, Parts, all_trained, put_images
from mtrain.config.foreign.objectives import aggregate_as_main
from mtrain.config.foreign.reading import after_launcher, is_variable, leaves, read_of, sets_environment
from mtrain.config.foreign.sharding import put_shard
from mtrain.config.foreign.trainers import (
    COMMON,
    drop_adapter_of_full_runs,
    finish,
    is_on,
    last_rate,
    put_length,
    put_warmup,
)
from mtrain.config.foreign.translation import UNUSED, Put, Row, Settings, Translation, above_0, rows_of, translated
from mtrain.config.foreign.values import is_same, listed, number, scalar
from mtrain.config.tables import table

_ACTOR = "actor_rollout_ref.actor."
_CORRECTION = "algorithm.rollout_correction."
_WHOLE = ("data.apply_chat_template_kwargs", "data.mm_processor_kwargs")
"""Mappings that are one setting."""


def _ulysses(config: Translation, value: Any, name: str) -> None:
    if number(value) > 1:
        config.put("layout.cp", value, name)
        config.put("layout.cp_comm", "ulysses", name)


def _column(ours: str) -> Put:
    def put(config: Translation, value: Any, name: str) -> None:
        if value != ours:
            config.put("data.columns", {**(config.get("data.columns") or {}), value: ours}, name)

    return put


def _betas(config: Translation, value: Any, name: str) -> None:
    first, second = value
    config.put("optimizer.beta1", first, name)
    config.put("optimizer.beta2", second, name)


def _all_of(config: Translation, value: Any, name: str) -> None:
    if number(value) > 0:
        config.lost.append(f"{name}={value}: all records are read; write a file with the ones you want")


def _frequency(key: str) -> Put:
    """Returns a function that sets `key` to a number of steps between events; reports after_each_epoch as lost."""

    def put(config: Translation, value: Any, name: str) -> None:
        if isinstance(value, str) and value.startswith("after_"):
            config.lost.append(f"{name}={value}: {key} is a number of steps")
        else:
            config.put(key, max(0, number(value)), name)

    return put


def _thresholds(value: Any) -> list[int | float]:
    """Reads one number, or two as `LEAST_MOST`."""
    return [number(part) for part in value.split("_")] if isinstance(value, str) else [number(value)]


_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **COMMON,
    "ulysses": _ulysses,
    "column": _column,
    "betas": _betas,
    "all_of": _all_of,
    "frequency": _frequency,
    "thresholds": _thresholds,
}
VERL = rows_of(table("verl"), _FUNCTIONS)
"""Dotted key of verl -> its translation."""
_REFERENCE = re.compile(r"\$\{([\w.]*[.:][^}]*)\}")
"""OmegaConf's reference to another key or a resolver; `${word}` is a shell variable."""
_OF_ROLLOUTS = ("actor.", "actor_rollout_ref.", "data.max_prompt_length", "data.max_response_length")


@dataclass(frozen=True)
class Trainer:
    """One of verl's trainers: maps keys of the table to its own names, and has its defaults."""

    groups: tuple[str, ...]
    is_loop: bool = False
    """Whether the trainer is an RL loop, whose samples come from rollouts instead of files."""
    is_megatron: bool = False

    @property
    def defaults(self) -> dict[str, Any]:
        """Returns key of the table -> default; later groups take precedence."""
        return {key: value for group in self.groups for key, value in table("verl")["defaults"][group].items()}

    def name(self, key: str) -> str:
        """Returns the trainer's name of a key of the table."""
        prefixes = {
            "model.": "actor_rollout_ref.model.",
            "optim.": f"{_ACTOR}optim.",
            "engine.": f"{_ACTOR}{'megatron' if self.is_megatron else 'fsdp_config'}.",
            "actor.": _ACTOR,
        }
        start = key[: key.find(".") + 1]
        return prefixes[start] + key.removeprefix(start) if self.is_loop and start in prefixes else key


def _trainer_of(names: set[str], texts: str) -> Trainer:
    """Returns the trainer that the launcher, or else the settings, imply.

    Args:
        names: Names of the settings.
        texts: Launcher and arguments that name the trainer or its engine.
    """
    is_loop = any(name.startswith("actor_rollout_ref.") for name in names) or "main_ppo" in texts
    of_megatron = (f"{_ACTOR}megatron.", "engine.tensor_model_parallel", "engine.pipeline_model_parallel")
    is_megatron = "megatron" in texts or any(name.startswith(of_megatron) for name in names)
    engine = ("optimizer", "megatron" if is_megatron else "fsdp")
    if is_loop:
        return Trainer((*engine, "loop"), is_loop=True, is_megatron=is_megatron)
    if "fsdp_sft_trainer" in texts or "model.partial_pretrain" in names:
        return Trainer(("optimizer", "fsdp", "records", "first"))
    return Trainer((*engine, "records", "files"), is_megatron=is_megatron)


def from_verl(words: Sequence[str]) -> Translation:
    """Translates configuration files of verl's trainers and arguments `KEY=VALUE`; later ones take precedence.

    Args:
        words: Paths of YAML files, and arguments; a launcher, such as `python3 -m verl.trainer.main_ppo`, is skipped.

    Raises:
        ConfigError: A file cannot be read, or neither a file nor an argument is given.
    """
    command, words = after_launcher(words)
    config = Translation("verl")
    included: list[str] = []
    settings = _read_arguments(config, words, included)
    if not settings:
        raise ConfigError("neither a file nor an argument KEY=VALUE of verl is given; give one")
    chosen = [f"{name}={value}" for name, value in settings.items() if name in ("engine", "optim", "model_engine")]
    strategies = [str(value) for name, value in settings.items() if name.endswith(".strategy")]
    trainer = _trainer_of(set(settings), " ".join([*command, *chosen, *strategies, *included, *_configs(words)]))
    rows = _rows(trainer, settings)
    references = {name: value for name, value in settings.items() if isinstance(value, str) and "${" in value}
    config.lost += [
        f"{name}={value}: a reference to another key; write the value" for name, value in references.items()
    ]
    known = {name: value for name, value in settings.items() if name not in references}
    run = translated(config, known, rows)
    _common(config, run, trainer)
    if trainer.is_loop:
        _actor(config, run, trainer)
    ranks = [run[trainer.name(f"model.{name}")] or 0 for name in ("lora_rank", "lora.rank")]
    drop_adapter_of_full_runs(config, is_adapted=any(number(rank) > 0 for rank in ranks))
    _images(config, run, trainer)
    finish(config, run)
    return config


def _images(config: Translation, run: Settings, trainer: Trainer) -> None:
    """Sets what is trained of a model that reads images: all of it, unless an actor freezes its tower."""
    switch = trainer.name("actor.freeze_vision_tower")
    signals = (switch, "data.image_key", "data.image_patch_size", "data.mm_processor_kwargs")
    parts = all_trained(run, signals)
    if is_on(run, switch):
        frozen = Part(True, run.described(switch))
        parts = Parts(frozen, frozen, parts.freeze_language_model)
    put_images(config, run, parts, signals)


_BASES = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer_engine", "sft_trainer")
"""Files of verl itself, whose values are its defaults."""


def _with_included(config: Translation, path: Path, chosen: list[str]) -> Iterator[Mapping[str, Any]]:
    """Yields the settings of a file and of those in its folder that its `defaults` name, in their order.

    Reports others, unless they are verl's own; appends all their names to `chosen`.
    """
    content = dict(read_of(path, config.program))
    entries = listed(content.pop("defaults", None) or [])
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        options = entry if isinstance(entry, Mapping) else {"": entry}
        groups = {group.removeprefix("override ").partition("@")[0]: option for group, option in options.items()}
        for group, option in groups.items():
            chosen.append(f"{group} {option}")
            file = path.parent / group / f"{option}.yaml"
            if option == "_self_":
                yield content
            elif not group and file != path and file.is_file():
                yield from _with_included(config, file, chosen)
            elif file.is_file() or (not group and option not in _BASES):
                config.lost.append(f"defaults: {group or option}: this file is not read; give its keys as well")


def _read_arguments(config: Translation, words: Sequence[str], chosen: list[str]) -> dict[str, Any]:
    """Reads files and arguments into one mapping; skips Hydra's own options, and `~KEY` removes a key.

    Appends the names of files that others include to `chosen`.
    """
    settings: dict[str, Any] = {}
    has_option = False
    for word in words:
        key, separator, value = word.lstrip("+").partition("=")
        if word.startswith("-"):
            has_option = not separator
        elif has_option:
            has_option = False
        elif word.startswith("~"):
            settings.pop(key.removeprefix("~"), None)
        elif separator and sets_environment(word):
            config.without_effect.append(key)
        elif separator and is_variable(_REFERENCE.sub("", value)):
            config.wrong.append(f"{word}: this contains a shell variable; write its value")
        elif separator:
            settings.update(leaves({key: scalar(value)}, _WHOLE))
        elif is_variable(word):
            config.wrong.append(f"{word}: this is a shell variable; write its value")
        else:
            for content in _with_included(config, Path(word), chosen):
                settings.update(leaves(content, _WHOLE))
    trainer_settings = {
        name: value for name, value in settings.items() if not name.startswith("hydra.") and name != "defaults"
    }
    return {name: _resolved(value, trainer_settings) for name, value in trainer_settings.items()}


def _resolved(value: Any, settings: Mapping[str, Any]) -> Any:
    """Resolves a value that is only a reference to another setting."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return value if match is None else settings.get(match[1], value)


def _configs(words: Sequence[str]) -> list[str]:
    pairs = zip(words, [*words[1:], ""])
    return [f"{word} {after}" for word, after in pairs if word.startswith(("--config-name", "-cn"))]


def _rows(trainer: Trainer, settings: Mapping[str, Any]) -> dict[str, Row]:
    """Returns the rows of a trainer, with its defaults, and rows that report unknown settings."""
    rows: dict[str, Row] = {}
    defaults = trainer.defaults
    for key, row in VERL.items():
        is_of_files = key.startswith("data.") or key in ("trainer.total_epochs", "trainer.test_freq")
        is_of_rollouts = key.startswith(_OF_ROLLOUTS)
        is_read = is_of_rollouts or not is_of_files if trainer.is_loop else not is_of_rollouts
        if is_read:
            rows[trainer.name(key)] = Row(row.put, defaults.get(key))
    if not trainer.is_loop:
        rows["engine.seed"] = UNUSED  # trainer.seed orders the samples
    for name in settings:
        if name not in rows and (name.endswith("_target_") or "profiler" in name):
            rows[name] = UNUSED
        elif name not in rows:
            reasons = (
                why for start, why in table("verl")["of_a_loop"].items() if trainer.is_loop and name.startswith(start)
            )
            rows[name] = _lost_row(next(reasons, "no key here corresponds"))
    return rows


def _lost_row(why: str) -> Row:
    return Row(lambda config, value, name: config.lost.append(f"{name}={value}: {why}"))


def _common(config: Translation, run: Settings, trainer: Trainer) -> None:
    name = trainer.name
    if trainer.is_loop:
        lengths, steps = ("data.max_prompt_length", "data.max_response_length"), "trainer.total_training_steps"
        config.put("data.seq_length", int(sum(number(run[length]) for length in lengths)), run.origin(*lengths))
        config.put("train.num_steps", above_0(number(run[steps] or 0)), run.origin(steps))
    else:
        put_length(config, run, "trainer.total_training_steps", "trainer.total_epochs")
    ratio = (
        "optim.warmup_steps_ratio"
        if name("optim.warmup_steps_ratio") in run.explicit
        else "optim.lr_warmup_steps_ratio"
    )
    put_warmup(config, run, name("optim.lr_warmup_steps"), name(ratio))
    if config.get("optimizer.schedule") == "cosine" and (least := run[name("optim.min_lr_ratio")]) is not None:
        last_rate(config, least, run.origin(name("optim.min_lr_ratio")))
    is_chat = config.get("data.format") == "messages" or "data.messages_key" in run.explicit
    if is_chat and (columns := config.get("data.columns")):
        used = {name: ours for name, ours in columns.items() if ours not in ("prompt", "response")}
        config.content["data"]["columns"] = used
    size, is_resharded = (name(f"engine.{key}") for key in ("fsdp_size", "reshard_after_forward"))
    if trainer.is_megatron and is_on(run, (switch := name("engine.use_megatron_fsdp"))):
        put_shard(config, switch, is_whole=True)
    elif not trainer.is_megatron:
        is_partly = is_same(run[size], 1) or is_same(run[is_resharded], False)
        put_shard(config, run.origin(size, is_resharded), is_whole=not is_partly)
    if not trainer.is_megatron:
        config.put("optimizer.decay_norms_and_biases", True, "verl's default, whose FSDP trainers decay all parameters")
    if config.get("layout.tp") in (None, 1):
        config.drop("layout.sp")
    is_dynamic, tokens = ("actor.use_dynamic_bsz", "actor.ppo_max_token_len_per_gpu")
    if not trainer.is_loop:
        is_dynamic, tokens = ("data.use_dynamic_bsz", "data.max_token_len_per_gpu")
    if is_on(run, name(is_dynamic)):
        _pack(config, run, name(is_dynamic), name(tokens))
    names = [run[f"trainer.{part}_name"] or trainer.defaults[part] for part in ("project", "experiment")]
    config.put("run.dir", "/".join(["checkpoints", *map(str, names)]), "verl's default of trainer.default_local_dir")
    interval = config.get("checkpoint.interval_steps")
    if interval and config.get("checkpoint.keep_last") is None:
        config.put(
            "checkpoint.keep_every_steps", interval, "verl's default of trainer.max_ckpt_to_keep, which keeps all"
        )


def _pack(config: Translation, run: Settings, is_dynamic: str, tokens: str) -> None:
    """Sets packed rows as wide as the most tokens in a forward pass of a data-parallel rank."""
    config.put("data.packing", {"batch": "sequences"}, run.origin(is_dynamic))
    config.drop("train.micro_batch_size")
    ranks, least = config.get("layout.cp"), config.get("data.seq_length")
    ranks = 1 if ranks is None else ranks
    width = int(number(run[tokens])) * ranks
    if isinstance(least, int):
        width = max(width, least)
    config.put("train.tokens_per_micro_batch", width, run.origin(tokens) + (" x layout.cp" if ranks > 1 else ""))


def _actor(config: Translation, run: Settings, trainer: Trainer) -> None:
    name = trainer.name
    config.put("data.kind", "mock", "samples come from a loop in Python: Engine.forward_backward")
    if config.get("data.packing"):
        config.put("data.isolate_documents", True, "samples of a row do not see each other")
    batch = (name("actor.ppo_mini_batch_size"), "actor_rollout_ref.rollout.n")
    size = int(number(run[batch[0]]) * number(run[batch[1]]))
    config.put("train.global_batch_size", size, f"{run.origin(batch[0])} x {batch[1]}, in sequences")
    _policy(config, run, trainer)
    _side_terms(config, run, trainer)
    _correct(config, run)
    if config.get("loss.function") == "gspo" and config.get("loss.aggregation") != "seq-mean-token-mean":
        config.notes.append("the loss of gspo is aggregated as loss_agg_mode says; before 0.9 verl ignored it there")
    temperature = run["actor_rollout_ref.rollout.temperature"]
    if temperature is not None and number(temperature) != 1:
        config.notes.append("the sampler's temperature is part of each sample: Datum(..., temperature=T)")


def _policy(config: Translation, run: Settings, trainer: Trainer) -> None:
    name = trainer.name
    if (ratio := name("actor.clip_ratio")) in run.explicit:
        config.notes.append(
            f"{ratio}={run[ratio]}: verl clips by clip_ratio_low and clip_ratio_high, each 0.2 by default"
        )
    if config.get("loss.function") != "ppo":
        config.drop("loss.options.dual_clip")
    if config.get("loss.aggregation") == "seq-mean-token-sum-norm":
        length = name("actor.loss_scale_factor")
        length = "data.max_response_length" if run[length] is None else length
        config.put("loss.norm_length", run[length], run.origin(length))


def _estimator(config: Translation, run: Settings, name: str) -> None:
    """Sets the estimator of the divergence; with a plus sign, verl gives any of them the gradient of k2."""
    value = str(run[name])
    if value in _ESTIMATORS:
        config.put("loss.side_terms.kl.options.estimator", _ESTIMATORS[value], run.described(name))
    elif value.removesuffix("+") in _ESTIMATORS:
        config.put("loss.side_terms.kl.options.estimator", "k2", run.described(name))
        config.notes.append(f"{name}={value} has the gradient of k2; here its value is that of k2 too")
    else:
        config.wrong.append(
            f"{name}={value}: options.estimator of loss.function=kl is k1, k2 or k3; choose one of them"
        )


def _correct(config: Translation, run: Settings) -> None:
    """Sets the weights by which verl corrects for the probabilities of the sampler."""
    level, bounds = run[f"{_CORRECTION}rollout_is"], run[f"{_CORRECTION}rollout_is_threshold"]
    if level not in ("token", "sequence") or bounds is None:
        return
    *least, most = _thresholds(bounds)  # two bounds leave out what is beyond them
    origin = run.origin(f"{_CORRECTION}rollout_is_threshold")
    config.put("loss.options.rollout_cap", most, origin)
    config.put("loss.options.rollout_floor", least[0] if least else None, origin)
    kind = f"{level}-{'mask' if least else 'truncate'}"
    config.put("loss.options.rollout_correction", kind, run.described(f"{_CORRECTION}rollout_is"))


def _side_terms(config: Translation, run: Settings, trainer: Trainer) -> None:
    switch, coefficient, kind, entropy = (
        trainer.name(f"actor.{key}") for key in ("use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coeff")
    )
    if is_on(run, switch):
        config.put("loss.side_terms.kl.function", "kl", run.origin(switch))
        config.put("loss.side_terms.kl.coefficient", number(run[coefficient]), run.origin(coefficient))
        _estimator(config, run, kind)
        aggregate_as_main(config, "kl")
    if bonus := number(run[entropy] or 0):
        config.put("loss.side_terms.entropy.function", "entropy", entropy)
        config.put("loss.side_terms.entropy.coefficient", -bonus, f"{entropy}, which is subtracted")
        aggregate_as_main(config, "entropy")
