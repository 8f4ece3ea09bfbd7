"""Files and arguments of verl's trainers as a configuration: supervised finetuning, and the actor of RL loops.

Source: verl 0.9.1, verl/trainer/config.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.command_lines import after_launcher, is_of_environment, is_variable
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
from mtrain.config.foreign.values import number, scalar
from mtrain.config.load import read_file
from mtrain.config.tables import table

_ACTOR = "actor_rollout_ref.actor."


def _ulysses(found: Translation, value: Any, name: str) -> None:
    if number(value) > 1:
        found.put("layout.cp", value, name)
        found.put("layout.cp_comm", "ulysses", name)


def _column(ours: str) -> Put:
    def put(found: Translation, value: Any, name: str) -> None:
        if value != ours:
            found.put("data.columns", {**(found.get("data.columns") or {}), value: ours}, name)

    return put


def _betas(found: Translation, value: Any, name: str) -> None:
    first, second = value
    found.put("optimizer.beta1", first, name)
    found.put("optimizer.beta2", second, name)


def _all_of(found: Translation, value: Any, name: str) -> None:
    if number(value) > 0:
        found.lost.append(f"{name}={value}: all records are read; make a file of some")


def _frequency(key: str) -> Put:
    """Returns a function that puts a number of steps between events; there may be none, or a word for an epoch."""

    def put(found: Translation, value: Any, name: str) -> None:
        if isinstance(value, str) and value.startswith("after_"):
            found.lost.append(f"{name}={value}: {key} is a number of steps")
        else:
            found.put(key, max(0, number(value)), name)

    return put


_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **COMMON,
    "ulysses": _ulysses,
    "column": _column,
    "betas": _betas,
    "all_of": _all_of,
    "frequency": _frequency,
    "estimator": _ESTIMATORS.__getitem__,
}
VERL = rows_of(table("verl"), _FUNCTIONS)
"""Dotted key of verl -> treatment."""
_REFERENCE = re.compile(r"\$\{([\w.]*[.:][^}]*)\}")
"""OmegaConf's reference to another key or a function of it; `${word}` is a shell variable."""
_OF_ROLLOUTS = ("actor.", "actor_rollout_ref.", "data.max_prompt_length", "data.max_response_length")


@dataclass(frozen=True)
class Trainer:
    """One of verl's trainers: its names of the table's keys, and the groups of its defaults."""

    groups: tuple[str, ...]
    is_loop: bool = False
    """Whether samples come from rollouts instead of files."""
    is_megatron: bool = False

    @property
    def defaults(self) -> dict[str, Any]:
        """Returns the defaults by the table's keys; later groups take precedence."""
        return {key: value for group in self.groups for key, value in table("verl")["defaults"][group].items()}

    def name(self, key: str) -> str:
        """Returns the full name of a key of the table."""
        places = {
            "model.": "actor_rollout_ref.model.",
            "optim.": f"{_ACTOR}optim.",
            "engine.": f"{_ACTOR}{'megatron' if self.is_megatron else 'fsdp_config'}.",
            "actor.": _ACTOR,
        }
        start = key[: key.find(".") + 1]
        return places[start] + key.removeprefix(start) if self.is_loop and start in places else key


def _trainer_of(names: set[str], texts: str) -> Trainer:
    """Returns the trainer that a start of verl means.

    Args:
        texts: Launcher and arguments.
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
    """Translates files of verl's trainers and arguments `KEY=VALUE`; later ones take precedence.

    Args:
        words: Paths of YAML files, and arguments; a launcher, such as `python3 -m verl.trainer.main_ppo`, is skipped.

    Raises:
        ConfigError: A file cannot be read, or there is neither a file nor an argument.
    """
    command, words = after_launcher(words)
    found = Translation("verl")
    given = _given(found, words)
    if not given:
        raise ConfigError("neither a file nor an argument KEY=VALUE of verl is given; give one")
    chosen = [f"{name}={value}" for name, value in given.items() if name in ("engine", "optim", "model_engine")]
    strategies = [str(value) for name, value in given.items() if name.endswith(".strategy")]
    trainer = _trainer_of(set(given), " ".join([*command, *chosen, *strategies, *_configs(words)]))
    rows = _rows(trainer, given)
    references = {name: value for name, value in given.items() if isinstance(value, str) and "${" in value}
    found.lost += [f"{name}={value}: a reference to another key; write the value" for name, value in references.items()]
    known = {name: value for name, value in given.items() if name not in references}
    run = translated(found, known, rows)
    _common(found, run, trainer)
    if trainer.is_loop:
        _actor(found, run, trainer)
    ranks = [run[trainer.name(f"model.{name}")] or 0 for name in ("lora_rank", "lora.rank")]
    drop_adapter_of_full_runs(found, is_adapted=any(number(rank) > 0 for rank in ranks))
    finish(found, run)
    return found


def _given(found: Translation, words: Sequence[str]) -> dict[str, Any]:
    """Reads files and arguments; skips Hydra's own options, and `~KEY` removes a key."""
    given: dict[str, Any] = {}
    has_option = False
    for word in words:
        key, separator, value = word.lstrip("+").partition("=")
        if word.startswith("-"):
            has_option = not separator
        elif has_option:
            has_option = False
        elif word.startswith("~"):
            given.pop(key.removeprefix("~"), None)
        elif separator and is_of_environment(word):
            found.without_effect.append(key)
        elif separator and is_variable(_REFERENCE.sub("", value)):
            found.wrong.append(f"{word}: this holds a variable of the shell; write its value")
        elif separator:
            given.update(_leaves({key: scalar(value)}))
        elif is_variable(word):
            found.wrong.append(f"{word}: this is a variable of the shell; write its value")
        else:
            given.update(_leaves(read_file(Path(word)).content))
    kept = {name: value for name, value in given.items() if not name.startswith("hydra.") and name != "defaults"}
    return {name: _resolved(value, kept) for name, value in kept.items()}


def _resolved(value: Any, given: Mapping[str, Any]) -> Any:
    """Resolves a value that is nothing but a reference to a given key."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return value if match is None else given.get(match[1], value)


def _configs(words: Sequence[str]) -> list[str]:
    told = zip(words, [*words[1:], ""])
    return [f"{word} {after}" for word, after in told if word.startswith(("--config-name", "-cn"))]


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping) and value and name != "apply_chat_template_kwargs":
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _rows(trainer: Trainer, given: Mapping[str, Any]) -> dict[str, Row]:
    """Returns the rows of a trainer, with its defaults, and of unknown given keys."""
    rows: dict[str, Row] = {}
    defaults = trainer.defaults
    for key, row in VERL.items():
        is_of_files = key.startswith("data.") or key in ("trainer.total_epochs", "trainer.test_freq")
        is_of_rollouts = key.startswith(_OF_ROLLOUTS)
        if (is_of_rollouts or not is_of_files) if trainer.is_loop else not is_of_rollouts:
            rows[trainer.name(key)] = Row(row.put, defaults.get(key))
    if not trainer.is_loop:
        rows["engine.seed"] = UNUSED  # trainer.seed orders the samples
    for name in given:
        if name not in rows and (name.endswith("_target_") or "profiler" in name):
            rows[name] = UNUSED
        elif name not in rows:
            reasons = (
                why for start, why in table("verl")["of_a_loop"].items() if trainer.is_loop and name.startswith(start)
            )
            rows[name] = _named(next(reasons, "no key here corresponds"))
    return rows


def _named(why: str) -> Row:
    return Row(lambda found, value, name: found.lost.append(f"{name}={value}: {why}"))


def _common(found: Translation, run: Settings, trainer: Trainer) -> None:
    name = trainer.name
    if trainer.is_loop:
        lengths, steps = ("data.max_prompt_length", "data.max_response_length"), "trainer.total_training_steps"
        found.put("data.seq_length", int(sum(number(run[length]) for length in lengths)), run.origin(*lengths))
        found.put("train.num_steps", above_0(number(run[steps] or 0)), run.origin(steps))
    else:
        put_length(found, run, "trainer.total_training_steps", "trainer.total_epochs")
    ratio = (
        "optim.warmup_steps_ratio" if name("optim.warmup_steps_ratio") in run.given else "optim.lr_warmup_steps_ratio"
    )
    put_warmup(found, run, name("optim.lr_warmup_steps"), name(ratio))
    if found.get("optimizer.schedule") == "cosine" and (least := run[name("optim.min_lr_ratio")]) is not None:
        last_rate(found, least, run.origin(name("optim.min_lr_ratio")))
    is_chat = found.get("data.format") == "messages" or "data.messages_key" in run.given
    if is_chat and (columns := found.get("data.columns")):
        kept = {name: ours for name, ours in columns.items() if ours not in ("prompt", "response")}
        found.content["data"]["columns"] = kept
    if not trainer.is_megatron:
        found.put("optimizer.decay_norms_and_biases", True, "verl's default, whose FSDP trainers decay all parameters")
    if found.get("layout.tp") in (None, 1):
        found.drop("layout.sp")
    is_dynamic, tokens = ("actor.use_dynamic_bsz", "actor.ppo_max_token_len_per_gpu")
    if not trainer.is_loop:
        is_dynamic, tokens = ("data.use_dynamic_bsz", "data.max_token_len_per_gpu")
    if is_on(run, name(is_dynamic)):
        _pack(found, run, name(is_dynamic), name(tokens))
    place = [run[f"trainer.{each}_name"] or trainer.defaults[each] for each in ("project", "experiment")]
    found.put("run.dir", "/".join(["checkpoints", *map(str, place)]), "verl's default of trainer.default_local_dir")
    interval = found.get("checkpoint.interval_steps")
    if interval and found.get("checkpoint.keep_last") is None:
        found.put(
            "checkpoint.keep_every_steps", interval, "verl's default of trainer.max_ckpt_to_keep, which keeps all"
        )


def _pack(found: Translation, run: Settings, is_dynamic: str, tokens: str) -> None:
    """Puts rows of as many tokens as a forward pass of a data-parallel rank may have."""
    found.put("data.packing", {"batch": "sequences"}, run.origin(is_dynamic))
    found.drop("train.micro_batch_size")
    ranks, least = found.get("layout.cp"), found.get("data.seq_length")
    ranks = 1 if ranks is None else ranks
    width = int(number(run[tokens])) * ranks
    if isinstance(least, int):
        width = max(width, least)
    found.put("train.tokens_per_micro_batch", width, run.origin(tokens) + (" x layout.cp" if ranks > 1 else ""))


def _actor(found: Translation, run: Settings, trainer: Trainer) -> None:
    name = trainer.name
    found.put("data.kind", "mock", "samples come from a loop in Python: Engine.forward_backward")
    if found.get("data.packing"):
        found.put("data.isolate_documents", True, "each sample is on its own")
    batch = (name("actor.ppo_mini_batch_size"), "actor_rollout_ref.rollout.n")
    size = int(number(run[batch[0]]) * number(run[batch[1]]))
    found.put("train.global_batch_size", size, f"{run.origin(batch[0])} x {batch[1]}, in sequences")
    _policy(found, run, trainer)
    _side_terms(found, run, trainer)
    temperature = run["actor_rollout_ref.rollout.temperature"]
    if temperature is not None and number(temperature) != 1:
        found.notes.append("the sampler's temperature is part of each sample: Datum(..., temperature=T)")


def _policy(found: Translation, run: Settings, trainer: Trainer) -> None:
    name = trainer.name
    if (ratio := name("actor.clip_ratio")) in run.given:
        found.notes.append(
            f"{ratio}={run[ratio]}: verl clips by clip_ratio_low and clip_ratio_high, each 0.2 by default"
        )
    if found.get("loss.function") != "ppo":
        found.drop("loss.options.dual_clip")
    if found.get("loss.aggregation") == "seq-mean-token-sum-norm":
        length = name("actor.loss_scale_factor")
        length = "data.max_response_length" if run[length] is None else length
        found.put("loss.norm_length", run[length], run.origin(length))


def _side_terms(found: Translation, run: Settings, trainer: Trainer) -> None:
    switch, coefficient, kind, entropy = (
        trainer.name(f"actor.{each}") for each in ("use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coeff")
    )
    if is_on(run, switch):
        found.put("loss.side_terms.kl.function", "kl", run.origin(switch))
        found.put("loss.side_terms.kl.coefficient", number(run[coefficient]), run.origin(coefficient))
        found.put("loss.side_terms.kl.options.estimator", _ESTIMATORS[run[kind]], run.said(kind))
    if bonus := number(run[entropy] or 0):
        found.put("loss.side_terms.entropy.function", "entropy", entropy)
        found.put("loss.side_terms.entropy.coefficient", -bonus, f"{entropy}, which is subtracted")
