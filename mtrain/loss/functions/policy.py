"""Policy gradient losses on tokens that were sampled from another policy, or from an older state of this one.

The data contain `advantages` (one per token or per sequence), `old_logprobs` (log-probabilities under the policy in the
denominator of the ratio) and, for the correction of stale rollouts, `rollout_logprobs` (log-probabilities from the
program that sampled the tokens). Which options, aggregation and side terms give which published algorithm:
docs/policy-losses.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtrain.loss.diagnostics import diagnosed, reports
from mtrain.loss.pair import LossPair, TermInputs, needs_extras, per_token, weigh


@per_token
@reports("clip_fraction", "approximate_kl", "ratio", maxima=("ratio_max",))
@needs_extras("advantages", old_logprobs="old_logprobs", rollout_cap="rollout_logprobs")
def ppo_loss(
    inputs: TermInputs,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    rollout_cap: float | None = None,
    old_logprobs: bool = True,
) -> LossPair:
    """Weighs and sums -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi / pi_old of each token.

    Args:
        inputs: One microbatch.
        clip_low: Distance below 1 at which ratios are clipped.
        clip_high: Distance above 1 at which ratios are clipped; larger than clip_low it is DAPO's clip-higher.
        dual_clip: Bound on the loss of a token of negative advantage, as a multiple of -A; above 1. None: no bound.
        rollout_cap: Cap of truncated importance sampling: each token's loss is multiplied by min(pi_old / pi_rollout,
            rollout_cap), for tokens that were sampled with other numbers than `old_logprobs`; no correction if None.
        old_logprobs: Whether the data contain pi_old. If not, the current policy takes its place, as in the first
            update on new rollouts: every ratio is exactly 1.

    Source: Schulman et al. 2017, equation 7; dual clip Ye et al. 2020, equation 5; clip-higher Yu et al. 2025 (DAPO),
    equation 10; truncated importance sampling Yao et al. 2025.
    """
    log_probs = _log_probs(inputs)
    old = _old(log_probs, inputs, old_logprobs)
    factor = _rollout_factor(old, inputs, rollout_cap)
    return _clipped(log_probs - old, inputs, clip_low, clip_high, dual_clip, factor)


@reports("clip_fraction", "approximate_kl", "ratio", maxima=("ratio_max",))
@needs_extras("advantages", old_logprobs="old_logprobs")
def gspo_loss(
    inputs: TermInputs, clip_low: float = 3e-4, clip_high: float = 4e-4, old_logprobs: bool = True
) -> LossPair:
    """Weighs and sums the loss of `ppo_loss` with the geometric mean of a sequence's ratios for each of its tokens.

    The mean is over all loss tokens of the sequence, on every rank; its value is that of the whole sequence, and its
    gradient reaches each token through that token's own log-probability. With one advantage per sequence, and weights
    of 0 and 1, this is the loss of whole sequences; with several it is GSPO-token. Two all-reduces of [sequences]
    numbers over CP.

    Source: Zheng et al. 2025 (GSPO), equations 5, 7 and 13.
    """
    log_probs = _log_probs(inputs)
    # no graph: each token's own log-probability carries the gradient below
    total = inputs.sum_over_sequence((log_probs - _old(log_probs, inputs, old_logprobs)).detach())
    count = inputs.sum_over_sequence(torch.ones_like(log_probs).detach())
    mean = torch.where(count > 0, total / count, 0.0)[inputs.sequence_ids].to(log_probs.dtype)
    return _clipped(mean + (log_probs - log_probs.detach()), inputs, clip_low, clip_high)


@per_token
@reports("clip_fraction", "approximate_kl", "ratio", maxima=("ratio_max",))
@needs_extras("advantages", old_logprobs="old_logprobs", rollout_cap="rollout_logprobs")
def cispo_loss(
    inputs: TermInputs,
    clip_low: float | None = None,
    clip_high: float = 0.2,
    rollout_cap: float | None = None,
    old_logprobs: bool = True,
) -> LossPair:
    """Weighs and sums -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: clipped ratios keep their gradient.

    Args:
        inputs: One microbatch.
        clip_low: Distance below 1 at which ratios are clipped. None: no bound below.
        clip_high: Distance above 1 at which ratios are clipped.
        rollout_cap: Cap of truncated importance sampling; see `ppo_loss`.
        old_logprobs: Whether the data contain pi_old; see `ppo_loss`.

    Source: MiniMax 2025 (MiniMax-M1), equations 4 and 5.
    """
    log_probs = _log_probs(inputs)
    old = _old(log_probs, inputs, old_logprobs)
    ratio = (log_probs - old).detach().exp()
    bounded = ratio.clamp(None if clip_low is None else 1 - clip_low, 1 + clip_high)
    losses = -bounded * inputs.extras["advantages"] * log_probs * _rollout_factor(old, inputs, rollout_cap)
    return _reported(weigh(losses, inputs), inputs, ratio, bounded != ratio)


def _log_probs(inputs: TermInputs) -> Tensor:
    """Returns the log-probabilities of the labels, [batch, seq], in nats; 0 where masked."""
    # where: the extras of a masked token may be anything and their exp inf; the gradient 0 x inf, nan, stops here
    return torch.where(inputs.weights != 0, -inputs.logits.cross_entropy(inputs.labels), 0.0)


def _old(log_probs: Tensor, inputs: TermInputs, is_given: bool) -> Tensor:
    """Returns log pi_old, [batch, seq]; arbitrary values where masked."""
    return inputs.extras["old_logprobs"] if is_given else log_probs.detach()


def _rollout_factor(old: Tensor, inputs: TermInputs, cap: float | None) -> Tensor | float:
    """Returns min(pi_old / pi_rollout, cap), [batch, seq]; 1 without a cap."""
    if cap is None:
        return 1.0
    return (old - inputs.extras["rollout_logprobs"]).exp().clamp(max=cap)


def _clipped(
    log_ratio: Tensor,
    inputs: TermInputs,
    low: float,
    high: float,
    dual: float | None = None,
    factor: Tensor | float = 1.0,
) -> LossPair:
    """Weighs and sums the clipped surrogate of the ratios."""
    ratio, advantages = log_ratio.exp(), inputs.extras["advantages"]
    plain = ratio * advantages
    surrogate = torch.minimum(plain, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual * advantages), surrogate)
    pair = weigh(-surrogate * factor, inputs)
    return _reported(pair, inputs, ratio.detach(), surrogate.detach() != plain.detach())


def _reported(pair: LossPair, inputs: TermInputs, ratio: Tensor, is_clipped: Tensor) -> LossPair:
    # log is safe: where a ratio is 0 the divergence is reported as inf
    means = {"clip_fraction": is_clipped.float(), "approximate_kl": ratio - 1 - ratio.log(), "ratio": ratio}
    return diagnosed(pair, inputs, means, maxima={"ratio_max": ratio})
