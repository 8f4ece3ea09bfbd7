"""Policy gradient losses of tokens sampled from another policy, or from an older state of this one.

The data contain `advantages` (one per token or per sequence), `old_logprobs` (log-probabilities under the policy in the
denominator of the ratio) and, to correct stale rollouts, `rollout_logprobs` (log-probabilities from the program that
sampled the tokens). docs/training/policy-losses.md lists the options, aggregations and side terms of published
algorithms.
"""

from collections.abc import Callable
from typing import Literal, TypeVar, assert_never

import torch
from torch import Tensor

from mtrain.core.loss.pair import (
    LossPair,
    TermInputs,
    at_temperature,
    diagnosed,
    needs_extras,
    per_token_unless,
    reports,
    weigh,
)

RolloutCorrection = Literal["token-truncate", "token-mask", "sequence-truncate", "sequence-mask", "sequence-mean-mask"]
_SEQUENCE_CORRECTIONS: tuple[RolloutCorrection, ...] = ("sequence-truncate", "sequence-mask", "sequence-mean-mask")
Function = TypeVar("Function", bound=Callable[..., LossPair])


def _policy_loss(function: Function) -> Function:
    """Marks what all losses in this module read and report."""
    needs = needs_extras(
        "advantages", old_logprobs="old_logprobs", rollout_cap="rollout_logprobs", rollout_floor="rollout_logprobs"
    )
    reported = reports("clip_fraction", "approximate_kl", "ratio", maxima=("ratio_max",))
    return reported(at_temperature(needs(function)))


@per_token_unless(rollout_correction=_SEQUENCE_CORRECTIONS)
@_policy_loss
def ppo_loss(
    inputs: TermInputs,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    rollout_cap: float | None = None,
    old_logprobs: bool = True,
    rollout_floor: float | None = None,
    rollout_correction: RolloutCorrection = "token-truncate",
    temperature: float | None = None,
) -> LossPair:
    """Weighs and sums -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with the ratio r = pi / pi_old of each token.

    Args:
        clip_low: Distance below 1 at which ratios are clipped.
        clip_high: Distance above 1 at which ratios are clipped; larger than clip_low, this is DAPO's clip-higher.
        dual_clip: Upper bound of the loss of a token with negative advantage, as a multiple of -A; above 1. None: no
            bound.
        rollout_cap: Upper bound of importance weights. The loss of each token is multiplied by the importance weight
            pi_old / pi_rollout, which corrects for tokens sampled with other probabilities than `old_logprobs`. No
            correction if both bounds are None.
        old_logprobs: Whether the data contain pi_old. If False, the current policy replaces it, as in the first update
            on new rollouts: every ratio is exactly 1.
        rollout_floor: Lower bound of importance weights. None: no bound.
        rollout_correction: How importance weights are bounded. token-truncate: the weight of each token is clamped to
            the bounds. token-mask: it is 0 beyond a bound. sequence-truncate and sequence-mask: the same for the weight
            of the whole sequence, the product over its loss tokens, which all its tokens get. sequence-mean-mask:
            tokens have separate weights without bounds, but 0 in a sequence whose geometric mean of weights is beyond a
            bound. The last three need whole sequences, so the logits of a microbatch are kept whole.
        temperature: Divisor of the logits, which must match that of `old_logprobs` and `rollout_logprobs`. None: the
            temperature of each sample in the data, else 1.

    Source: Schulman et al. 2017, equation 7; dual clip Ye et al. 2020, equation 5; clip-higher Yu et al. 2025 (DAPO),
    equation 10; truncated importance sampling Yao et al. 2025; its modes as `vllm_importance_sampling_mode` of TRL
    1.16, `rollout_is` of verl, and tis, icepop and seq-mask-tis of NeMo-RL.
    """
    log_probs, old = _log_probs(inputs, temperature, old_logprobs)
    factor = _rollout_factor(old, inputs, rollout_cap, rollout_floor, rollout_correction)
    return _clipped((log_probs - old).exp(), inputs, (clip_low, clip_high), factor, dual_clip)


@_policy_loss
def gspo_loss(
    inputs: TermInputs,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    old_logprobs: bool = True,
    rollout_cap: float | None = None,
    rollout_floor: float | None = None,
    rollout_correction: RolloutCorrection = "token-truncate",
    temperature: float | None = None,
) -> LossPair:
    """Weighs and sums the loss of `ppo_loss`, with the geometric mean of a sequence's ratios as the ratio of each
    token.

    The mean is over all loss tokens of the sequence on all ranks. The gradient reaches each token through its own
    log-probability. With one advantage per sequence and weights of 0 and 1 this is the loss of whole sequences; with an
    advantage per token it is GSPO-token. Two all-reduces of [sequences] numbers over CP.

    Args:
        clip_low: Distance below 1 at which ratios are clipped.
        clip_high: Distance above 1 at which ratios are clipped.
        old_logprobs: Whether the data contain pi_old; see `ppo_loss` for this and all further options.

    Source: Zheng et al. 2025 (GSPO), equations 5, 7 and 13.
    """
    log_probs, old = _log_probs(inputs, temperature, old_logprobs)
    # without a graph: the gradient flows through each token's own log-probability below
    mean = _over_sequence((log_probs - old).detach(), inputs, is_mean=True)
    factor = _rollout_factor(old, inputs, rollout_cap, rollout_floor, rollout_correction)
    return _clipped((mean + (log_probs - log_probs.detach())).exp(), inputs, (clip_low, clip_high), factor)


@per_token_unless(rollout_correction=_SEQUENCE_CORRECTIONS)
@_policy_loss
def cispo_loss(
    inputs: TermInputs,
    clip_low: float | None = None,
    clip_high: float = 0.2,
    rollout_cap: float | None = None,
    old_logprobs: bool = True,
    rollout_floor: float | None = None,
    rollout_correction: RolloutCorrection = "token-truncate",
    temperature: float | None = None,
) -> LossPair:
    """Weighs and sums -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi (sg: stop-gradient), so that clipped tokens
    keep their gradient.

    Args:
        clip_low: Distance below 1 at which ratios are clipped. None: no bound below.
        clip_high: Distance above 1 at which ratios are clipped.
        rollout_cap: Upper bound of importance weights; see `ppo_loss` for this and all further options.
        old_logprobs: Whether the data contain pi_old.

    Source: MiniMax 2025 (MiniMax-M1), equations 4 and 5.
    """
    log_probs, old = _log_probs(inputs, temperature, old_logprobs)
    factor = _rollout_factor(old, inputs, rollout_cap, rollout_floor, rollout_correction)
    ratio = (log_probs - old).detach().exp()
    bounded = ratio.clamp(None if clip_low is None else 1 - clip_low, 1 + clip_high)
    losses = -bounded * inputs.extras["advantages"] * log_probs * factor
    return _reported(losses, inputs, ratio, bounded != ratio)


def _log_probs(inputs: TermInputs, temperature: float | None, has_old: bool) -> tuple[Tensor, Tensor]:
    """Returns log pi and log pi_old of the labels, [batch, seq] in nats; log pi is 0 where masked."""
    # extras of a masked token may be anything and their exp inf; `where` stops the gradient 0 x inf = nan
    log_probs = torch.where(inputs.weights != 0, -inputs.logits_at(temperature).cross_entropy(inputs.labels), 0.0)
    return log_probs, inputs.extras["old_logprobs"] if has_old else log_probs.detach()


def _rollout_factor(
    old: Tensor, inputs: TermInputs, cap: float | None, floor: float | None, correction: RolloutCorrection
) -> Tensor | float:
    """Returns the importance weight of each token, [batch, seq]; 1 without bounds."""
    if cap is None and floor is None:
        return 1.0
    log_weights = old - inputs.extras["rollout_logprobs"]
    match correction:
        case "token-truncate" | "token-mask":
            weights = judged = log_weights.exp()
        case "sequence-truncate" | "sequence-mask":
            weights = judged = _over_sequence(log_weights, inputs).exp()
        case "sequence-mean-mask":
            weights, judged = log_weights.exp(), _over_sequence(log_weights, inputs, is_mean=True).exp()
        case _:
            assert_never(correction)
    bounded = judged.clamp(floor, cap)
    return bounded if correction.endswith("truncate") else torch.where(judged == bounded, weights, 0.0)


def _over_sequence(values: Tensor, inputs: TermInputs, is_mean: bool = False) -> Tensor:
    """Returns each token's sum, or mean, of values over the loss tokens of its sequence, [batch, seq]; no graph."""
    sums = inputs.sum_over_sequence(values.detach())
    if is_mean:
        count = inputs.sum_over_sequence(torch.ones_like(values).detach())
        sums = torch.where(count > 0, sums / count, 0.0)
    return sums[inputs.sequence_ids].to(values.dtype)


def _clipped(
    ratio: Tensor, inputs: TermInputs, clip: tuple[float, float], factor: Tensor | float, dual: float | None = None
) -> LossPair:
    """Weighs and sums the clipped surrogate; `clip` has the distances of the lower and the upper bound from 1."""
    advantages = inputs.extras["advantages"]
    plain = ratio * advantages
    surrogate = torch.minimum(plain, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages)
    if dual is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual * advantages), surrogate)
    return _reported(-surrogate * factor, inputs, ratio.detach(), surrogate.detach() != plain.detach())


def _reported(losses: Tensor, inputs: TermInputs, ratio: Tensor, is_clipped: Tensor) -> LossPair:
    # if a ratio is 0 its log makes the reported divergence inf
    means = {"clip_fraction": is_clipped.float(), "approximate_kl": ratio - 1 - ratio.log(), "ratio": ratio}
    return diagnosed(weigh(losses, inputs), inputs, means, maxima={"ratio_max": ratio})
