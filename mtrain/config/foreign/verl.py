# ruff: noqa: SIM905 - many names read better as words than as strings
"""Files and arguments of verl's trainers as a configuration: supervised finetuning, and the actor of its loops.

Source: verl 0.9.1, verl/trainer/config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.config.foreign.trainers import (
    SCHEDULES,
    files_of,
    folder_of,
    optimizer_of,
    packing_of,
    recomputed,
    trackers,
    translated,
)
from mtrain.config.foreign.translation import Put, Translation, constant, lost, no_effect, scalar, to
from mtrain.config.load import read_file

_PLACES = {
    "actor_rollout_ref.model.": "model.",
    "actor_rollout_ref.actor.optim.": "optim.",
    "actor_rollout_ref.actor.megatron.": "engine.",
    "actor_rollout_ref.actor.fsdp_config.": "engine.",
    "actor_rollout_ref.actor.": "actor.",
}
"""Section of the actor -> section in which the table has its keys."""
_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_LENGTHS = ("data.max_prompt_length", "data.max_response_length")
_OF_A_LOOP = {
    "trainer.total_epochs": "a loop counts its own steps",
    "trainer.test_freq": "a loop validates on its own",
    "actor_rollout_ref.rollout.": "an inference engine draws rollouts; docs/rl.md connects one",
    "actor_rollout_ref.ref.": "log-probabilities of a reference come with the rollouts, as ref_logprobs",
    "actor_rollout_ref.": "no key here corresponds",
    "algorithm.": "a loop computes advantages; examples/grpo_loop.py is one",
    "critic.": "there is no critic; advantages come with the rollouts",
    "custom_reward_function.": "a loop computes rewards",
    "reward": "a loop computes rewards",
    "data.": "a loop reads prompts; samples come from rollouts",
}
"""Beginning of keys of a loop around the trainer -> what stands for them here; the first that fits holds."""


def _unless_off(key: str, change: Callable[[Any], Any] = lambda value: value) -> Put:
    """Returns the function that puts a value above 0; 0 and -1 switch it off, as nothing does here."""
    return lambda found, value, name: found.put(key, change(value) if value > 0 else None, name)


def _ulysses(found: Translation, value: Any, name: str) -> None:
    if value > 1:
        found.put("layout.cp", value, name)
        found.put("layout.cp_comm", "ulysses", name)


def _column(ours: str) -> Put:
    def put(found: Translation, value: Any, name: str) -> None:
        if value != ours:
            columns = found.content.get("data", {}).get("columns", {})
            found.put("data.columns", {**columns, value: ours}, name)

    return put


def _betas(found: Translation, value: Any, name: str) -> None:
    found.put("optimizer.beta1", value[0], name)
    found.put("optimizer.beta2", value[1], name)


def _last_rate(found: Translation, value: Any, name: str) -> None:
    found.put("optimizer.min_lr", value * found.content["optimizer"]["lr"], f"{name} x learning rate")


def _clip(*options: str) -> Put:
    def put(found: Translation, value: Any, name: str) -> None:
        for option in options:
            found.put(f"loss.options.{option}", float(value), name)

    return put


def _all_of(found: Translation, value: Any, name: str) -> None:
    if value > 0:
        found.lost.append(f"{name}={value}: all records are read; make a file of some")


def _entropy(found: Translation, value: Any, name: str) -> None:
    if value:
        found.put("loss.side_terms.entropy.function", "entropy", name)
        found.put("loss.side_terms.entropy.coefficient", -float(value), f"{name}, which is subtracted")


_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
VERL: dict[str, Put] = {
    "model.path": folder_of,
    "model.partial_pretrain": folder_of,
    "model.lora_rank": _unless_off("adapter.rank"),
    "model.lora_alpha": to("adapter.alpha", float),
    "model.lora.rank": _unless_off("adapter.rank"),
    "model.lora.alpha": to("adapter.alpha", float),
    "model.lora.dropout": to("adapter.dropout"),
    "model.target_modules": to("adapter.targets"),
    "model.enable_gradient_checkpointing": recomputed,
    "data.train_files": files_of("data.train"),
    "data.val_files": files_of("data.valid"),
    "data.train_batch_size": to("train.global_batch_size"),
    "data.micro_batch_size_per_gpu": to("train.micro_batch_size"),
    "data.use_dynamic_bsz": packing_of("sequences"),
    "data.max_token_len_per_gpu": to("train.tokens_per_micro_batch"),
    "data.max_length": to("data.seq_length"),
    "data.truncation": constant("data.too_long", {"error": "refuse", "left": "start", "right": "end"}),
    "data.messages_key": _column("messages"),
    "data.tools_key": _column("tools"),
    "data.multiturn.messages_key": _column("messages"),
    "data.multiturn.tools_key": _column("tools"),
    "data.multiturn.enable": to("data.format", lambda _: "messages"),
    "data.prompt_key": _column("prompt"),
    "data.response_key": _column("response"),
    "data.train_max_samples": _all_of,
    "data.val_max_samples": _all_of,
    "data.apply_chat_template_kwargs": to("data.chat_template_kwargs"),
    "engine.tensor_model_parallel_size": to("layout.tp"),
    "engine.pipeline_model_parallel_size": to("layout.pp"),
    "engine.virtual_pipeline_model_parallel_size": to("layout.vpp"),
    "engine.context_parallel_size": to("layout.cp"),
    "engine.expert_model_parallel_size": to("layout.ep"),
    "engine.expert_tensor_parallel_size": to("layout.etp"),
    "engine.sequence_parallel": to("layout.sp"),
    "engine.ulysses_sequence_parallel_size": _ulysses,
    "engine.use_distributed_optimizer": to("train.distributed_optimizer"),
    "engine.optimizer_offload": to("train.offload_optimizer"),
    "engine.dtype": constant("train.precision", {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}),
    "engine.override_transformer_config.recompute_granularity": recomputed,
    "ulysses_sequence_parallel_size": _ulysses,
    "optim.lr": to("optimizer.lr", float),
    "optim.weight_decay": to("optimizer.weight_decay"),
    "optim.betas": _betas,
    "optim.clip_grad": to("optimizer.clip_grad"),
    "optim.optimizer": optimizer_of,
    "optim.lr_warmup_steps_ratio": to("optimizer.warmup_ratio"),
    "optim.warmup_steps_ratio": to("optimizer.warmup_ratio"),
    "optim.lr_warmup_steps": _unless_off("optimizer.warmup_steps"),
    "optim.lr_decay_steps": _unless_off("optimizer.decay_steps"),
    "optim.lr_scheduler": constant("optimizer.schedule", SCHEDULES),
    "optim.lr_scheduler_type": constant("optimizer.schedule", SCHEDULES),
    "optim.warmup_style": constant("optimizer.schedule", SCHEDULES),
    "optim.lr_decay_style": constant("optimizer.schedule", SCHEDULES),
    "optim.min_lr": to("optimizer.min_lr", float),
    "optim.min_lr_ratio": _last_rate,
    "optim.total_training_steps": _unless_off("train.num_steps"),
    "actor.ppo_micro_batch_size_per_gpu": to("train.micro_batch_size"),
    "actor.use_dynamic_bsz": packing_of("sequences"),
    "actor.ppo_max_token_len_per_gpu": to("train.tokens_per_micro_batch"),
    "actor.grad_clip": to("optimizer.clip_grad"),
    "actor.ulysses_sequence_parallel_size": _ulysses,
    "actor.clip_ratio": _clip("clip_low", "clip_high"),
    "actor.clip_ratio_low": _clip("clip_low"),
    "actor.clip_ratio_high": _clip("clip_high"),
    "actor.clip_ratio_c": _clip("dual_clip"),
    "actor.policy_loss.loss_mode": constant("loss.function", {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}),
    "actor.loss_agg_mode": constant(
        "loss.aggregation",
        {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")},
    ),
    "actor.loss_scale_factor": to("loss.norm_length"),
    "actor.use_kl_loss": to("loss.side_terms.kl.function", lambda _: "kl"),
    "actor.kl_loss_coef": to("loss.side_terms.kl.coefficient", float),
    "actor.kl_loss_type": constant("loss.side_terms.kl.options.estimator", _ESTIMATORS),
    "actor.entropy_coeff": _entropy,
    "actor.ppo_epochs": lost("a loop calls optim_step as often as it likes on the same rollouts"),
    "trainer.total_epochs": to("train.num_epochs"),
    "trainer.total_training_steps": _unless_off("train.num_steps"),
    "trainer.save_freq": lambda found, value, name: found.put("checkpoint.interval_steps", max(0, value), name),
    "trainer.test_freq": lambda found, value, name: found.put("valid.interval_steps", max(0, value), name),
    "trainer.default_local_dir": to("run.dir"),
    "trainer.project_name": to("metrics.project"),
    "trainer.experiment_name": to("run.name"),
    "trainer.logger": trackers,
    "trainer.seed": to("train.seed"),
    "trainer.max_ckpt_to_keep": to("checkpoint.keep_last"),
    "trainer.max_actor_ckpt_to_keep": to("checkpoint.keep_last"),
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
        """.split(),
        no_effect,
    ),
}
"""Dotted key of verl -> what becomes of its value."""


def from_verl(words: Sequence[str]) -> Translation:
    """Translates files of verl's trainers and the arguments `KEY=VALUE` of a start of it; later ones hold.

    Args:
        words: Paths of YAML files, and arguments. Other words, such as `python3 -m verl.trainer.main_ppo`, are left
            out where arguments follow them.

    Raises:
        ConfigError: A file cannot be read, or there is neither a file nor an argument.
    """
    given: dict[str, Any] = {}
    first = next((number for number, word in enumerate(words) if "=" in word), None)
    for number, word in enumerate(words):
        key, separator, value = word.lstrip("+").partition("=")
        if separator:
            given.update(_leaves({key: scalar(value)}))
        elif first is None or number > first or word.endswith((".yaml", ".yml")):
            given.update(_leaves(read_file(Path(word)).content))
    if not given:
        raise ConfigError("there is neither a file nor an argument KEY=VALUE; give one of verl")
    found = Translation("verl")
    is_loop = any(name.startswith("actor_rollout_ref.") for name in given)
    if is_loop:
        _put_samples(found, given)
    translated(found, given, {name: _place_of(name, is_loop, value) for name, value in given.items()})
    if found.content.get("layout", {}).get("tp", 1) == 1:
        found.drop("layout.sp")
    if "packing" not in found.content.get("data", {}):
        found.drop("train.tokens_per_micro_batch")
    if is_loop:
        _drop_unused_terms(found)
    return found


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping) and name != "apply_chat_template_kwargs":
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _place_of(name: str, is_loop: bool, value: Any) -> Put:
    """Returns what becomes of a key; data are prompts in the configuration of a loop."""
    if isinstance(value, str) and "${" in value:
        return lost("a reference to another key; write the value")
    section = next((start for start in _PLACES if name.startswith(start)), None)
    known = VERL.get(name if section is None else _PLACES[section] + name.removeprefix(section))
    if known is not None and not (is_loop and name.startswith(("data.", "trainer.total_epochs", "trainer.test_freq"))):
        return known
    if name.endswith("_target_") or "profiler" in name:
        return no_effect
    reasons = (why for start, why in _OF_A_LOOP.items() if is_loop and name.startswith(start))
    return lost(next(reasons, "no key here corresponds"))


def _put_samples(found: Translation, given: dict[str, Any]) -> None:
    """Puts what a loop's configuration says of samples in several keys, and takes these keys out of what is given."""
    if "actor_rollout_ref.actor.policy_loss.loss_mode" not in given:
        found.put("loss.function", "ppo", "verl's default of policy_loss.loss_mode")
    found.put("data.kind", "mock", "samples come from a loop in Python: Engine.forward_backward")
    batch, prompt, answer = (given.get(name) for name in (_BATCH, *_LENGTHS))
    if isinstance(batch, int):
        each = given.pop("actor_rollout_ref.rollout.n", 1)
        origin = f"{_BATCH} x actor_rollout_ref.rollout.n, in sequences"
        found.put("train.global_batch_size", given.pop(_BATCH) * each, origin)
    if isinstance(prompt, int) and isinstance(answer, int):
        found.put("data.seq_length", sum(given.pop(name) for name in _LENGTHS), " + ".join(_LENGTHS))
    if given.get("actor_rollout_ref.rollout.temperature", 1.0) != 1.0:
        found.notes.append("the sampler's temperature is part of each sample: Datum(..., temperature=T)")


def _drop_unused_terms(found: Translation) -> None:
    """Takes out the coefficient of a divergence that is not used, and options that the loss does not have."""
    loss = found.content["loss"]
    if "function" not in loss.get("side_terms", {}).get("kl", {}):
        found.drop("loss.side_terms.kl")
    if loss["function"] != "ppo":
        found.drop("loss.options.dual_clip")
