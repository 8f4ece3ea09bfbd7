"""Losses of policy gradients straight from the papers, one sequence at a time, in float64.

Each takes the logits [length, vocab_size] of a sequence, the sequence and the options, and returns token losses
[length]; tokens of weight 0 may have any finite value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.oracle.loss import Sequence


def _logp(logits: Tensor, sequence: Sequence) -> Tensor:
    labels = torch.where(sequence.weights > 0, sequence.labels, 0)
    return logits.log_softmax(-1)[torch.arange(len(labels)), labels]


def _correction(sequence: Sequence, cap: float | None) -> Tensor:
    """Computes truncated importance sampling: min(pi_old / pi_rollout, C)."""
    if cap is None:
        return torch.ones_like(sequence.weights)
    return (sequence.extras["old_logprobs"] - sequence.extras["rollout_logprobs"]).exp().clamp(max=cap)


def ppo(
    logits: Tensor,
    sequence: Sequence,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    rollout_cap: float | None = None,
) -> Tensor:
    """Computes verl's max(-A r, -A clip(r)), and for A < 0 the smaller of that and -A c."""
    advantages = sequence.extras["advantages"]
    ratio = (_logp(logits, sequence) - sequence.extras["old_logprobs"]).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    return losses * _correction(sequence, rollout_cap)


def gspo(logits: Tensor, sequence: Sequence, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Tensor:
    """Computes GSPO's objective of a sequence, differentiated through its ratio; its tokens share the loss."""
    counted = sequence.weights > 0
    if not len(counted):
        return sequence.weights
    gap = (_logp(logits, sequence) - sequence.extras["old_logprobs"])[counted]
    ratio = gap.mean().exp() if len(gap) else torch.ones((), dtype=torch.float64)
    (advantage,) = sequence.extras["advantages"].unique()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
    return loss.expand(len(counted))


def cispo(
    logits: Tensor,
    sequence: Sequence,
    clip_low: float | None = None,
    clip_high: float = 0.2,
    rollout_cap: float | None = None,
) -> Tensor:
    """Computes -sg(clip(r)) A log pi."""
    logp = _logp(logits, sequence)
    with torch.no_grad():
        factor = (logp - sequence.extras["old_logprobs"]).exp().clamp(max=1 + clip_high)
        if clip_low is not None:
            factor = factor.clamp(min=1 - clip_low)
    return -factor * sequence.extras["advantages"] * logp * _correction(sequence, rollout_cap)


def kl(logits: Tensor, sequence: Sequence, estimator: str = "k3") -> Tensor:
    """Computes Schulman's estimators from the ratio q = pi_ref / pi: -log q, (log q)^2 / 2, (q - 1) - log q."""
    q = (sequence.extras["ref_logprobs"] - _logp(logits, sequence)).exp()
    return {"k1": -q.log(), "k2": q.log() ** 2 / 2, "k3": (q - 1) - q.log()}[estimator]


def dft(logits: Tensor, sequence: Sequence) -> Tensor:
    """Computes cross entropy times the probability, which is taken as a constant."""
    logp = _logp(logits, sequence)
    with torch.no_grad():
        probability = logp.exp()
    return -probability * logp


POLICY_LOSSES: dict[str, Callable[..., Tensor]] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "kl": kl, "dft": dft}
