"""TRL's own losses: of preferences for a model given as a function of token ids, of policies for log-probabilities."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

LogitsOf = Callable[[Tensor], Tensor]
"""[batch, tokens] ids -> [batch, tokens, vocab] float64 logits, with a graph."""


class Answer(NamedTuple):
    """A prompt with its answer."""

    ids: Sequence[int]
    mask: Sequence[int]
    """1 for each token of the answer."""


class Trl:
    """TRL's loss functions without a trainer, with what they read of `self`."""

    def __init__(self, model: LogitsOf, reference: LogitsOf) -> None:
        self._model, self._reference = model, reference

    def pairs(self, kind: str, chosen: Sequence[Answer], rejected: Sequence[Answer], **options: Any) -> Tensor:
        """Returns the loss of a batch of pairs: dpo (`loss_types` of DPOTrainer), orpo or simpo."""
        loss: Tensor = getattr(self, f"_{kind}")(chosen, rejected, **options)
        return loss

    def _dpo(self, chosen: Sequence[Answer], rejected: Sequence[Answer], **options: Any) -> Tensor:
        from trl.trainer.dpo_trainer import DPOTrainer

        trainer = _stand_in(
            ld_alpha=None,
            precompute_ref_logps=False,
            ref_model=_scorer(self._reference),
            f_divergence_type="reverse_kl",
            loss_weights=[1.0],
            use_weighting=False,
            **options,
        )
        loss: Tensor = DPOTrainer._compute_loss(trainer, _scorer(self._model), _batch([*chosen, *rejected]), False)
        return loss

    def _orpo(self, chosen: Sequence[Answer], rejected: Sequence[Answer], beta: float) -> Tensor:
        """Computes ORPO with the likelihood of the answers alone, pair by pair; TRL adds that of the prompts."""
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer

        ours, theirs = (_means(self._model, each, ORPOTrainer) for each in (chosen, rejected))
        # TRL rounds scores to float32, here and in no other loss
        kept, Tensor.float = Tensor.float, Tensor.double  # type: ignore[method-assign]
        try:
            ratio = ORPOTrainer.odds_ratio_loss(_stand_in(beta=beta), ours, theirs)[0]
        finally:
            Tensor.float = kept  # type: ignore[method-assign]
        loss: Tensor = (-ours - ratio).mean()
        return loss

    def _simpo(self, chosen: Sequence[Answer], rejected: Sequence[Answer], **options: Any) -> Tensor:
        from trl.experimental.cpo.cpo_trainer import CPOTrainer

        trainer = _stand_in(alpha=0.0, loss_type="simpo", **options)
        ours, theirs = (_means(self._model, each, CPOTrainer) for each in (chosen, rejected))
        loss: Tensor = CPOTrainer.cpo_loss(trainer, ours, theirs)[0].mean()
        return loss

    def kto(
        self, answers: Sequence[Answer], labels: Sequence[bool], mismatched: Sequence[Answer], **options: Any
    ) -> Tensor:
        """Returns KTOTrainer's loss of a batch of answers."""
        from trl.trainer.kto_trainer import KTOTrainer

        trainer = _stand_in(
            calculate_KL=True,
            precompute_ref_logps=False,
            ref_model=_scorer(self._reference),
            loss_type="kto",
            **options,
        )
        trainer._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(trainer, model, batch)
        moved = {f"KL_{name}": value for name, value in _batch(mismatched).items()}
        batch = _batch(answers) | moved | {"label": torch.tensor(labels)}
        loss: Tensor = KTOTrainer._compute_loss(trainer, _scorer(self._model), batch, False)
        return loss


def policy_loss(
    log_probs: Tensor,
    mask: Tensor,
    extras: Mapping[str, Tensor],
    rollout_cap: float | None = None,
    rollout_floor: float | None = None,
    rollout_mode: str = "token_truncate",
    **options: Any,
) -> Tensor:
    """Returns the loss of GRPOTrainer for log-probabilities of sampled tokens, [batch, tokens].

    Args:
        log_probs: Log-probabilities under the policy.
        mask: 1 for each token that counts.
        extras: Values by the names of the configuration; without `old_logprobs` the policy is that of the samples.
        rollout_cap: Upper bound of the correction for other numbers at sampling.
        rollout_floor: Lower bound of it.
        rollout_mode: What is bounded and how: `vllm_importance_sampling_mode`.
        options: What the trainer or its arguments are given, such as `loss_type` and `epsilon_low`.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    known = {"beta": 0.0, "importance_sampling_level": "token", "delta": None} | options
    trainer = _stand_in(
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=rollout_cap is not None or rollout_floor is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *model, **inputs: (log_probs, torch.zeros_like(log_probs), None),
        **known,
    )
    trainer.args = SimpleNamespace(delta=known["delta"], use_bias_correction_kl=False, steps_per_generation=1)
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    names = {"old_logprobs": "old_per_token_logps", "ref_logprobs": "ref_per_token_logps", "advantages": "advantages"}
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask}
    inputs |= {theirs: extras[ours] for ours, theirs in names.items() if ours in extras}
    inputs["num_items_in_batch"] = mask.sum()
    if trainer.use_vllm:  # as GRPOTrainer computes it where it generates, which cannot be called alone
        gaps = (extras["old_logprobs"] - extras["rollout_logprobs"]) * mask
        ratio = (gaps.sum(-1, keepdim=True) if rollout_mode.startswith("sequence") else gaps).exp()
        low, high = rollout_floor or -math.inf, rollout_cap or math.inf
        is_wrong = (ratio < low) | (ratio > high)
        masked = ratio.masked_fill(is_wrong, 0.0)
        inputs["importance_sampling_ratio"] = masked if rollout_mode.endswith("mask") else ratio.clamp(low, high)
    loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def _stand_in(**options: Any) -> Any:
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        unwrap_model=lambda x: x,
        num_processes=1,
    )
    metrics = {"train": _Lists(), "eval": _Lists()}
    known = {"accelerator": accelerator, "_metrics": metrics, "_total_train_tokens": 0, "_tp_size": 1}
    args = SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None)
    model = torch.nn.Module()
    model.is_gradient_checkpointing = False  # type: ignore[assignment]
    return SimpleNamespace(aux_loss_enabled=False, args=args, model=model, **known, **options)


class _Lists(dict[str, list[float]]):
    def __missing__(self, name: str) -> list[float]:
        return self.setdefault(name, [])


def _batch(answers: Sequence[Answer]) -> dict[str, Tensor]:
    size = max(len(each.ids) for each in answers)

    def padded(rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([[*row, *[0] * (size - len(row))] for row in rows])

    return {
        "input_ids": padded([each.ids for each in answers]),
        "attention_mask": padded([[1] * len(each.ids) for each in answers]),
        "completion_mask": padded([each.mask for each in answers]),
    }


def _scorer(model: LogitsOf) -> Any:
    """Builds what TRL makes of a causal model: its outputs have log-probabilities of the labels."""

    def forward(input_ids: Tensor, labels: Tensor, **ignored: Any) -> Any:
        log_probs, nothing = _of_labels(model, input_ids, labels), torch.zeros(labels.shape)[:, 1:]
        return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing > 0)

    scorer = torch.nn.Module()
    scorer.forward = forward
    return scorer


def _of_labels(model: LogitsOf, ids: Tensor, labels: Tensor) -> Tensor:
    """Returns the labels' log-probabilities, [batch, tokens - 1]: 0 where there is no label."""
    likely = model(ids)[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(labels[:, 1:] >= 0, likely, 0.0)


def _means(model: LogitsOf, answers: Sequence[Answer], trainer: Any) -> Tensor:
    batch = _batch(answers)
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    means: Tensor = trainer.get_batch_logps(model(batch["input_ids"]), labels, average_log_prob=True)
    return means
