"""Trainers of verl: their key names and defaults.

Source: verl 0.9.1, verl/trainer/config; fsdp_sft_trainer of verl 0.7.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ACTOR = "actor_rollout_ref.actor."


@dataclass(frozen=True)
class Trainer:
    """One of verl's trainers: its names of the table's keys, and its defaults."""

    defaults: Mapping[str, Any]
    is_loop: bool = False
    """Whether samples come from rollouts instead of files."""
    is_megatron: bool = False

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


_OPTIMIZER: Mapping[str, Any] = {
    "optim.lr": 1e-3,
    "optim.weight_decay": 0.01,
    "optim.betas": [0.9, 0.999],
    "optim.clip_grad": 1.0,
    "optim.lr_warmup_steps": -1,
    "optim.lr_warmup_steps_ratio": 0.0,
}
_FSDP: Mapping[str, Any] = {
    **_OPTIMIZER,
    "optim.optimizer": "AdamW",
    "optim.lr_scheduler_type": "constant",
    "optim.min_lr_ratio": 0.0,
    "engine.dtype": "bfloat16",
    "model.enable_gradient_checkpointing": True,
    "model.lora_rank": 0,
    "model.lora_alpha": 16,
}
_MEGATRON: Mapping[str, Any] = {
    **_OPTIMIZER,
    "optim.optimizer": "adam",
    "optim.lr_decay_style": "constant",
    "optim.min_lr": 0.0,
    "engine.dtype": "bfloat16",
    "engine.sequence_parallel": True,
    "engine.use_distributed_optimizer": True,
    "model.lora.rank": 0,
    "model.lora.alpha": 32,
    "model.lora.dropout": 0.0,
}
_RECORDS: Mapping[str, Any] = {
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_length": 1024,
    "data.truncation": "error",
    "trainer.total_epochs": 4,
    "trainer.seed": 1,
    "project": "gsm8k-sft",
    "experiment": "test",
}
_FILES: Mapping[str, Any] = {**_RECORDS, "data.use_dynamic_bsz": True, "data.max_token_len_per_gpu": 8192}
_FIRST: Mapping[str, Any] = {
    **_FSDP,
    **_RECORDS,
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.lr_scheduler_type": "cosine",
    "data.prompt_key": "question",
    "data.response_key": "answer",
}
"""Defaults of fsdp_sft_trainer, verl 0.7.0."""
_LOOP: Mapping[str, Any] = {
    "optim.lr": 1e-6,
    "actor.ppo_mini_batch_size": 256,
    "actor.ppo_max_token_len_per_gpu": 16384,
    "actor.clip_ratio_low": 0.2,
    "actor.clip_ratio_high": 0.2,
    "actor.clip_ratio_c": 3.0,
    "actor.policy_loss.loss_mode": "vanilla",
    "actor.loss_agg_mode": "token-mean",
    "actor.kl_loss_coef": 0.001,
    "actor.kl_loss_type": "low_var_kl",
    "engine.seed": 42,
    "actor_rollout_ref.rollout.n": 1,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "project": "verl_examples",
    "experiment": "gsm8k",
}


def trainer_of(names: set[str], texts: str) -> Trainer:
    """Returns the trainer that a start of verl means.

    Args:
        texts: Launcher and arguments.
    """
    is_loop = any(name.startswith("actor_rollout_ref.") for name in names) or "main_ppo" in texts
    of_megatron = (f"{_ACTOR}megatron.", "engine.tensor_model_parallel", "engine.pipeline_model_parallel")
    is_megatron = "megatron" in texts or any(name.startswith(of_megatron) for name in names)
    if is_loop:
        engine = _MEGATRON if is_megatron else _FSDP
        return Trainer({**engine, **_LOOP}, is_loop=True, is_megatron=is_megatron)
    if "fsdp_sft_trainer" in texts or "model.partial_pretrain" in names:
        return Trainer(_FIRST)
    return Trainer({**(_MEGATRON if is_megatron else _FSDP), **_FILES}, is_megatron=is_megatron)
