"""Losses of sampled tokens from the equations of their papers; one row per sequence, [batch, seq] float64.

Where p is the log-probability of a token, o that of the old policy, A its advantage and r = exp(p - o):

    ppo    -min(r A, clip(r, 1 - low, 1 + high) A); dual clip c: for A < 0 at most -c A   Schulman 2017, 7; Ye 2020, 5
    gspo   the same with s = exp(mean of p - o over the sequence), whose gradient each
           token takes by its own p: s sg(1/exp(p)) exp(p)                                 Zheng 2025, 5 and 13
    cispo  -sg(clip(r)) A p                                                               MiniMax 2025, 4
    kl     k1 d, k2 d^2 / 2, k3 exp(-d) - 1 + d with d = p - log pi_ref                   Schulman 2020

Tokens that were sampled with other numbers than o count min(exp(o - rollout), cap) times (Yao 2025).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

PolicyLosses = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""Function of the labels' log-probabilities, of which tokens count, and of extras that returns losses, [batch, seq];
arbitrary where a token does not count."""

EXTRAS = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs")
"""Names of the extras that are read."""


def policy_losses(function: str, options: Mapping[str, Any]) -> PolicyLosses | None:
    """Returns the losses that a name in the configuration stands for; None if it is none of these."""
    return functools.partial(POLICY_LOSSES[function], **options) if function in POLICY_LOSSES else None


def _clipped(
    p: Tensor,
    counts: Tensor,
    extras: Mapping[str, Tensor],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    rollout_cap: float | None = None,
    old_logprobs: bool = True,
) -> Tensor:
    old = extras["old_logprobs"] if old_logprobs else p.detach()
    losses = _surrogate(torch.exp(p - old), extras["advantages"], clip_low, clip_high, dual_clip)
    return losses * _correction(old, extras, rollout_cap)


def _of_sequences(
    p: Tensor,
    counts: Tensor,
    extras: Mapping[str, Tensor],
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    old_logprobs: bool = True,
) -> Tensor:
    old = extras["old_logprobs"] if old_logprobs else p.detach()
    rows = [
        (row[of_row].mean() if of_row.any() else row.sum() * 0.0).expand_as(row)
        for row, of_row in zip((p - old).detach(), counts, strict=True)
    ]
    ratio = torch.exp(torch.stack(rows)) * torch.exp(p) / torch.exp(p).detach()
    return _surrogate(ratio, extras["advantages"], clip_low, clip_high, None)


def _of_constants(
    p: Tensor,
    counts: Tensor,
    extras: Mapping[str, Tensor],
    clip_low: float | None = None,
    clip_high: float = 0.2,
    rollout_cap: float | None = None,
    old_logprobs: bool = True,
) -> Tensor:
    old = extras["old_logprobs"] if old_logprobs else p.detach()
    ratio = torch.exp(p.detach() - old)
    bounded = ratio.clamp(min=0.0 if clip_low is None else 1 - clip_low, max=1 + clip_high)
    return -bounded * extras["advantages"] * p * _correction(old, extras, rollout_cap)


def _divergence(p: Tensor, counts: Tensor, extras: Mapping[str, Tensor], estimator: str = "k3") -> Tensor:
    difference = p - extras["ref_logprobs"]
    estimates = {
        "k1": difference,
        "k2": 0.5 * difference**2,
        "k3": torch.exp(-difference) - 1 + difference,
    }
    return estimates[estimator]


def _surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    """Computes the clipped surrogate by cases: a token has no gradient once it is beyond the clip in its direction."""
    bounds = torch.where(advantages > 0, torch.full_like(ratio, 1 + high), 1 - low)  # two numbers would give float32
    is_far = torch.where(advantages > 0, ratio > 1 + high, ratio < 1 - low)
    losses = -advantages * torch.where(is_far, bounds, ratio)
    if dual is None:
        return losses
    most = -dual * advantages
    return torch.where((advantages < 0) & (losses > most), most, losses)


def _correction(old: Tensor, extras: Mapping[str, Tensor], cap: float | None) -> Tensor:
    return torch.ones_like(old) if cap is None else torch.exp(old - extras["rollout_logprobs"]).clamp(max=cap)


POLICY_LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo": _clipped,
    "gspo": _of_sequences,
    "cispo": _of_constants,
    "kl": _divergence,
}
"""Losses by their names in the configuration."""
