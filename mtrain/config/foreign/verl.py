# ruff: noqa: SIM905 - many names read better as words than as strings
"""Files and arguments of verl's trainers as a configuration: supervised finetuning, and the actor of RL loops.

Source: verl 0.9.1, verl/trainer/config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.command_lines import after_launcher, is_of_environment, is_variable
from mtrain.config.foreign.trainers import (
    SCHEDULES,
    drop_adapter_of_full_runs,
    files_of,
    finish,
    folder_of,
    is_on,
    last_rate,
    optimizer_of,
    put_length,
    put_warmup,
    recomputed,
    targets,
    trackers,
)
from mtrain.config.foreign.translation import (
    UNUSED,
    Put,
    Row,
    Settings,
    Translation,
    above_0,
    choice,
    later,
    lost,
    to,
    translated,
)
from mtrain.config.foreign.values import boolean, number, scalar
from mtrain.config.foreign.verl_defaults import Trainer, trainer_of
from mtrain.config.load import read_file

_OF_A_LOOP = {
    "trainer.total_epochs": "a loop counts its own steps",
    "trainer.test_freq": "a loop validates on its own",
    "actor_rollout_ref.rollout.": "an inference engine draws rollouts; docs/training/rl.md connects one",
    "actor_rollout_ref.ref.": "log-probabilities of a reference come with the rollouts, as ref_logprobs",
    "actor_rollout_ref.": "no key here corresponds",
    "algorithm.": "a loop computes advantages; examples/grpo_loop.py is one",
    "critic.": "there is no critic; advantages come with the rollouts",
    "custom_reward_function.": "a loop computes rewards",
    "reward": "a loop computes rewards",
    "data.": "a loop reads prompts; samples come from rollouts",
}
"""Beginning of keys of a loop around the trainer -> our equivalent; the first match counts."""


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


def _frequency(key: str) -> Row:
    """Row of a number of steps between events; there may be none, or a word for an epoch."""

    def put(found: Translation, value: Any, name: str) -> None:
        if isinstance(value, str) and value.startswith("after_"):
            found.lost.append(f"{name}={value}: {key} is a number of steps")
        else:
            found.put(key, max(0, number(value)), name)

    return Row(put)


_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_SCHEDULE = choice("optimizer.schedule", SCHEDULES)
VERL: dict[str, Row] = {
    "model.path": Row(folder_of),
    "model.partial_pretrain": Row(folder_of),
    "model.tokenizer_path": to("data.tokenizer"),
    "model.lora_rank": to("adapter.rank", change=above_0),
    "model.lora_alpha": to("adapter.alpha"),
    "model.lora.rank": to("adapter.rank", change=above_0),
    "model.lora.alpha": to("adapter.alpha"),
    "model.lora.dropout": to("adapter.dropout"),
    "model.lora.type": choice("adapter.kind", {"lora": None, "dora": "dora"}),
    "model.lora.target_modules": Row(targets),
    "model.lora_adapter_path": to("adapter.path"),
    "model.lora.adapter_path": to("adapter.path"),
    "model.target_modules": Row(targets),
    "model.exclude_modules": lost("name the targets that are wanted", ""),
    "model.enable_gradient_checkpointing": Row(recomputed),
    "data.train_files": Row(files_of("data.train")),
    "data.val_files": Row(files_of("data.valid")),
    "data.train_batch_size": to("train.global_batch_size"),
    "data.micro_batch_size_per_gpu": to("train.micro_batch_size"),
    "data.max_length": to("data.seq_length"),
    "data.truncation": choice("data.too_long", {"error": "refuse", "left": "start", "right": "end"}),
    "data.messages_key": Row(_column("messages")),
    "data.tools_key": Row(_column("tools")),
    "data.multiturn.messages_key": Row(_column("messages")),
    "data.multiturn.tools_key": Row(_column("tools")),
    "data.multiturn.enable": choice("data.format", {True: "messages", False: None}),
    "data.prompt_key": Row(_column("prompt")),
    "data.response_key": Row(_column("response")),
    "data.train_max_samples": Row(_all_of),
    "data.val_max_samples": Row(_all_of),
    "data.apply_chat_template_kwargs": to("data.chat_template_kwargs"),
    "engine.tensor_model_parallel_size": to("layout.tp"),
    "engine.pipeline_model_parallel_size": to("layout.pp"),
    "engine.virtual_pipeline_model_parallel_size": to("layout.vpp"),
    "engine.context_parallel_size": to("layout.cp"),
    "engine.expert_model_parallel_size": to("layout.ep"),
    "engine.expert_tensor_parallel_size": to("layout.etp"),
    "engine.sequence_parallel": to("layout.sp"),
    "engine.ulysses_sequence_parallel_size": Row(_ulysses),
    "engine.use_distributed_optimizer": to("train.distributed_optimizer"),
    "engine.optimizer_offload": to("train.offload_optimizer"),
    "engine.dtype": choice("train.precision", {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}),
    "engine.model_dtype": lost("main weights are float32", "fp32"),
    "engine.seed": to("train.seed"),
    "engine.override_transformer_config.recompute_granularity": Row(recomputed),
    "ulysses_sequence_parallel_size": Row(_ulysses),
    "optim.lr": to("optimizer.lr"),
    "optim.weight_decay": to("optimizer.weight_decay"),
    "optim.weight_decay_incr_style": lost("the weight decay is the same in all steps", "constant"),
    "optim.betas": Row(_betas),
    "optim.clip_grad": to("optimizer.clip_grad"),
    "optim.optimizer": Row(optimizer_of),
    "optim.lr_warmup_init": lost("a warm-up begins at 0", 0),
    "optim.lr_decay_steps": to("optimizer.decay_steps", change=above_0),
    **{f"optim.{name}": _SCHEDULE for name in ("lr_scheduler", "lr_scheduler_type", "warmup_style", "lr_decay_style")},
    "optim.num_cycles": lost("a cosine falls once", 0.5),
    "optim.min_lr": to("optimizer.min_lr"),
    "actor.ppo_micro_batch_size_per_gpu": to("train.micro_batch_size"),
    "actor.grad_clip": to("optimizer.clip_grad"),
    "actor.ulysses_sequence_parallel_size": Row(_ulysses),
    "actor.clip_ratio_low": to("loss.options.clip_low", change=number),
    "actor.clip_ratio_high": to("loss.options.clip_high", change=number),
    "actor.clip_ratio_c": to("loss.options.dual_clip", change=number),
    "actor.policy_loss.loss_mode": choice("loss.function", {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}),
    "actor.loss_agg_mode": choice("loss.aggregation", {name: name for name in _AGGREGATIONS}),
    "actor.kl_loss_type": later(lambda value: _ESTIMATORS[value]),
    "actor.ppo_epochs": lost("a loop calls optim_step as often as it likes on the same rollouts", 1),
    "trainer.save_freq": _frequency("checkpoint.interval_steps"),
    "trainer.test_freq": _frequency("valid.interval_steps"),
    "trainer.default_local_dir": to("run.dir"),
    "trainer.project_name": to("metrics.project"),
    "trainer.experiment_name": to("run.name"),
    "trainer.logger": Row(trackers),
    "trainer.seed": to("train.seed"),
    "trainer.max_ckpt_to_keep": to("checkpoint.keep_last"),
    "trainer.max_actor_ckpt_to_keep": to("checkpoint.keep_last"),
    **dict.fromkeys("data.use_dynamic_bsz actor.use_dynamic_bsz actor.use_kl_loss".split(), later(boolean)),
    **dict.fromkeys(
        """
        data.max_token_len_per_gpu data.max_prompt_length data.max_response_length optim.lr_warmup_steps_ratio
        optim.warmup_steps_ratio optim.lr_warmup_steps optim.min_lr_ratio optim.total_training_steps
        actor.ppo_mini_batch_size actor.ppo_max_token_len_per_gpu actor.clip_ratio actor.loss_scale_factor
        actor.kl_loss_coef actor.entropy_coeff actor_rollout_ref.rollout.n actor_rollout_ref.rollout.temperature
        trainer.total_epochs trainer.total_training_steps
        """.split(),
        later(number),
    ),
    **dict.fromkeys(
        """
        trainer.resume_mode trainer.nnodes trainer.n_gpus_per_node trainer.device trainer.default_hdfs_dir
        trainer.balance_batch trainer.val_before_train trainer.log_val_generations trainer.critic_warmup
        data.pad_mode data.num_workers data.tokenizer model.use_shm model.trust_remote_code model.use_liger
        model.use_remove_padding model.use_fused_kernels model.strategy engine.strategy engine.name
        engine.param_offload engine.use_mbridge engine.use_dist_checkpointing engine.fsdp_size
        engine.reshard_after_forward engine.forward_prefetch engine.use_torch_compile engine.entropy_checkpointing
        actor.strategy actor.use_torch_compile actor.use_fused_kernels actor.entropy_from_logits_with_chunking
        actor.entropy_checkpointing actor.shuffle optim.zero_indexed_step use_remove_padding data.balance_dp_token
        optim.optimizer_impl data.use_shm engine.override_transformer_config.attention_backend engine optim model_engine
        """.split(),
        UNUSED,
    ),
}
"""Dotted key of verl -> treatment."""
_REFERENCE = re.compile(r"\$\{([\w.]*[.:][^}]*)\}")
"""OmegaConf's reference to another key or a function of it; `${word}` is a shell variable."""
_OF_ROLLOUTS = ("actor.", "actor_rollout_ref.", "data.max_prompt_length", "data.max_response_length")


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
        raise ConfigError("there is neither a file nor an argument KEY=VALUE; give one of verl")
    chosen = [f"{name}={value}" for name, value in given.items() if name in ("engine", "optim", "model_engine")]
    strategies = [str(value) for name, value in given.items() if name.endswith(".strategy")]
    trainer = trainer_of(set(given), " ".join([*command, *chosen, *strategies, *_configs(words)]))
    table = _table(trainer, given)
    references = {name: value for name, value in given.items() if isinstance(value, str) and "${" in value}
    found.lost += [f"{name}={value}: a reference to another key; write the value" for name, value in references.items()]
    known = {name: value for name, value in given.items() if name not in references}
    run = translated(found, known, table)
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


def _table(trainer: Trainer, given: Mapping[str, Any]) -> dict[str, Row]:
    """Returns the rows of a trainer, with its defaults, and of unknown given keys."""
    table: dict[str, Row] = {}
    for key, row in VERL.items():
        is_of_files = key.startswith("data.") or key in ("trainer.total_epochs", "trainer.test_freq")
        is_of_rollouts = key.startswith(_OF_ROLLOUTS)
        if (is_of_rollouts or not is_of_files) if trainer.is_loop else not is_of_rollouts:
            table[trainer.name(key)] = Row(row.put, trainer.defaults.get(key))
    if not trainer.is_loop:
        table["engine.seed"] = UNUSED  # trainer.seed orders the samples
    for name in given:
        if name not in table and (name.endswith("_target_") or "profiler" in name):
            table[name] = UNUSED
        elif name not in table:
            reasons = (why for start, why in _OF_A_LOOP.items() if trainer.is_loop and name.startswith(start))
            table[name] = _named(next(reasons, "no key here corresponds"))
    return table


def _named(why: str) -> Row:
    return Row(lambda found, value, name: found.lost.append(f"{name}={value}: {why}"))


def _common(found: Translation, run: Settings, trainer: Trainer) -> None:
    name = trainer.name
    if trainer.is_loop:
        lengths, steps = ("data.max_prompt_length", "data.max_response_length"), "trainer.total_training_steps"
        found.put("data.seq_length", int(sum(number(run[each]) for each in lengths)), run.origin(*lengths))
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
            f"{ratio}={run[ratio]}: verl clips by clip_ratio_low and clip_ratio_high, of which each is 0.2 where it is "
            "not given"
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
