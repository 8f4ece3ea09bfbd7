"""Losses of sampled tokens from the papers' equations; one row per sequence, [batch, seq] float64.

With p the log-probability of a token, o that of the old policy, A its advantage and r = exp(p - o):

    ppo    -min(r A, clip(r, 1 - low, 1 + high) A); dual clip c: for A < 0 at most -c A   Schulman 2017, 7; Ye 2020, 5
    gspo   the same with s = exp(mean of p - o over the sequence), whose gradient each
           token takes by its own p: s sg(1/exp(p)) exp(p)                                 Zheng 2025, 5 and 13
    cispo  -sg(clip(r)) A p                                                               MiniMax 2025, 4
    kl     k1 d, k2 d^2 / 2, k3 exp(-d) - 1 + d with d = p - log pi_ref                   Schulman 2020

If the sampler's log-probabilities differ from o, a token's loss is multiplied by w = exp(o - rollout) (Yao 2025). w is
clamped to [floor, cap] or set to 0 outside it, token by token, or for a sequence by the product W of its tokens' w; or
a token keeps its w if the geometric mean of the sequence's w is inside, else gets 0 (TRL, verl, NeMo-RL).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

PolicyLosses = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""Function of the labels' log-probabilities, the mask of counted tokens and the extras; returns losses, [batch, seq],
arbitrary for tokens that do not count."""

EXTRAS = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs")
"""Names of the extras that policy losses read."""


def policy_losses(function: str, options: Mapping[str, Any]) -> PolicyLosses | None:
    """Returns the losses of a function in the configuration; None if it is not a policy loss."""
    if function == "kl":
        return functools.partial(_divergence, **options)
    if function not in POLICY_LOSSES:
        return None
    correction = {name: value for name, value in options.items() if name.startswith("rollout_")}
    reads_old = options.get("old_logprobs", True)
    loss_options = {name: value for name, value in options.items() if name not in (*correction, "old_logprobs")}

    def losses(p: Tensor, counts: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        old = extras["old_logprobs"] if reads_old else p.detach()
        plain = POLICY_LOSSES[function](_Tokens(p, old, counts, extras["advantages"]), **loss_options)
        return plain * _correction(old, counts, extras, **correction)

    return losses


class _Tokens(NamedTuple):
    """Sampled tokens, [batch, seq]."""

    p: Tensor
    old: Tensor
    counts: Tensor
    advantages: Tensor


def _ppo(tokens: _Tokens, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Tensor:
    return _surrogate(torch.exp(tokens.p - tokens.old), tokens.advantages, clip_low, clip_high, dual_clip)


def _gspo(tokens: _Tokens, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Tensor:
    rows = [
        (differences[counts].mean() if counts.any() else differences.sum() * 0.0).expand_as(differences)
        for differences, counts in zip((tokens.p - tokens.old).detach(), tokens.counts, strict=True)
    ]
    ratio = torch.exp(torch.stack(rows)) * torch.exp(tokens.p) / torch.exp(tokens.p).detach()
    return _surrogate(ratio, tokens.advantages, clip_low, clip_high, None)


def _cispo(tokens: _Tokens, clip_low: float | None = None, clip_high: float = 0.2) -> Tensor:
    ratio = torch.exp(tokens.p.detach() - tokens.old)
    bounded = ratio.clamp(min=0.0 if clip_low is None else 1 - clip_low, max=1 + clip_high)
    return -bounded * tokens.advantages * tokens.p


def _divergence(p: Tensor, counts: Tensor, extras: Mapping[str, Tensor], estimator: str = "k3") -> Tensor:
    difference = p - extras["ref_logprobs"]
    estimates = {
        "k1": difference,
        "k2": 0.5 * difference**2,
        "k3": torch.exp(-difference) - 1 + difference,
    }
    return estimates[estimator]


def _surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    """Computes the clipped surrogate: a token beyond the clip in its direction has no gradient."""
    bounds = torch.where(advantages > 0, torch.full_like(ratio, 1 + high), 1 - low)  # two numbers would give float32
    is_far = torch.where(advantages > 0, ratio > 1 + high, ratio < 1 - low)
    losses = -advantages * torch.where(is_far, bounds, ratio)
    if dual is None:
        return losses
    most = -dual * advantages
    return torch.where((advantages < 0) & (losses > most), most, losses)


def _correction(
    old: Tensor,
    counts: Tensor,
    extras: Mapping[str, Tensor],
    rollout_cap: float | None = None,
    rollout_floor: float | None = None,
    rollout_correction: str = "token-truncate",
) -> Tensor:
    if rollout_cap is None and rollout_floor is None:
        return torch.ones_like(old)
    low = 0.0 if rollout_floor is None else rollout_floor
    high = float("inf") if rollout_cap is None else rollout_cap
    mode = rollout_correction
    ratios = torch.exp(old - extras["rollout_logprobs"])
    judged = ratios
    if mode.startswith("sequence"):
        gaps = torch.where(counts, old - extras["rollout_logprobs"], 0.0).sum(1, keepdim=True)
        if mode == "sequence-mean-mask":
            gaps = gaps / counts.sum(1, keepdim=True).clamp(min=1)
        judged = torch.exp(gaps).expand_as(old)
    applied = ratios if mode == "sequence-mean-mask" else judged
    if mode.endswith("truncate"):
        return applied.clamp(low, high)
    return torch.where((judged >= low) & (judged <= high), applied, 0.0)


POLICY_LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
}
"""Losses with an advantage by their names in the configuration."""
