"""Losses of policy gradients on tokens that another policy, or an older state of this one, has drawn.

Their data bring along `advantages` (per token, or one a sequence), `old_logprobs` (the log-probabilities of the policy
of which the ratio is taken) and, for the correction of stale rollouts, `rollout_logprobs` (those of the program that
drew the tokens). What they are called elsewhere follows from options, aggregation and side terms:
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
        clip_low: How far below 1 a ratio still counts.
        clip_high: How far above 1; above clip_low it is DAPO's clip-higher.
        dual_clip: A token of negative advantage loses no more than so many times its advantage; above 1. None: no
            bound.
        rollout_cap: Each token's loss is multiplied by min(pi_old / pi_rollout, rollout_cap): truncated importance
            sampling for tokens that were drawn by other numbers than `old_logprobs`. None: not at all.
        old_logprobs: Whether the data bring pi_old along. Else the policy as it is takes its place, as in the first
            update on new rollouts: every ratio is 1, to the bit.

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
    """As `ppo_loss`, with the geometric mean of a sequence's ratios as the ratio of each of its tokens.

    The mean is over the loss tokens of the sequence, wherever they lie; its value is the whole sequence's, its gradient
    reaches each token by that token's own log-probability. With one advantage a sequence, and weights of 0 and 1, that
    is the loss of whole sequences; with several it is GSPO-token. Two all-reduces of [sequences] numbers over CP.

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
        clip_low: None: no bound below.
        clip_high: As of `ppo_loss`.
        rollout_cap: As of `ppo_loss`.
        old_logprobs: As of `ppo_loss`.

    Source: MiniMax 2025 (MiniMax-M1), equations 4 and 5.
    """
    log_probs = _log_probs(inputs)
    old = _old(log_probs, inputs, old_logprobs)
    ratio = (log_probs - old).detach().exp()
    bounded = ratio.clamp(None if clip_low is None else 1 - clip_low, 1 + clip_high)
    losses = -bounded * inputs.extras["advantages"] * log_probs * _rollout_factor(old, inputs, rollout_cap)
    return _reported(weigh(losses, inputs), inputs, ratio, bounded != ratio)


def _log_probs(inputs: TermInputs) -> Tensor:
    """[batch, seq] of the labels, in nats; 0 where masked."""
    # where: beside a masked token the extras may be anything, and exp of it inf, whose gradient of 0 x inf is nan; it
    # ends here
    return torch.where(inputs.weights != 0, -inputs.logits.cross_entropy(inputs.labels), 0.0)


def _old(log_probs: Tensor, inputs: TermInputs, is_given: bool) -> Tensor:
    """[batch, seq] log pi_old; anything where masked."""
    return inputs.extras["old_logprobs"] if is_given else log_probs.detach()


def _rollout_factor(old: Tensor, inputs: TermInputs, cap: float | None) -> Tensor | float:
    """[batch, seq] min(pi_old / pi_rollout, cap); 1 where nothing is corrected."""
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
    """The clipped surrogate of ratios."""
    ratio, advantages = log_ratio.exp(), inputs.extras["advantages"]
    plain = ratio * advantages
    surrogate = torch.minimum(plain, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual * advantages), surrogate)
    pair = weigh(-surrogate * factor, inputs)
    return _reported(pair, inputs, ratio.detach(), surrogate.detach() != plain.detach())


def _reported(pair: LossPair, inputs: TermInputs, ratio: Tensor, is_clipped: Tensor) -> LossPair:
    # log is safe: where a ratio has become 0 the divergence is inf, and says so
    means = {"clip_fraction": is_clipped.float(), "approximate_kl": ratio - 1 - ratio.log(), "ratio": ratio}
    return diagnosed(pair, inputs, means, maxima={"ratio_max": ratio})
