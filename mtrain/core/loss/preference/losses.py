"""Preference losses of pairs of answers, and of single answers (kto)."""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mtrain.core.loss.preference.scores import PreferenceValue, ScoredSequences, agreed_fault, preference_loss


@preference_loss(needs_reference=True)
def dpo_loss(sequences: ScoredSequences, beta: float = 0.1, label_smoothing: float = 0.0) -> PreferenceValue:
    """Computes -log sigmoid(beta x margin) for each pair.

    The margin is the chosen answer's log ratio of model to reference model, minus the rejected answer's.

    Scores are sums over the tokens of an answer; with loss.aggregation=seq-mean-token-mean they are means, which makes
    this length-normalised DPO.

    Args:
        beta: Inverse temperature: the larger, the closer the model stays to the reference.
        label_smoothing: Share of pairs whose preference is assumed to be reversed (conservative DPO).

    Source: Rafailov et al. 2023, equation 7; label smoothing as in Mitchell 2023 (cDPO).
    """
    pairs = sequences.pairs()
    chosen, rejected = beta * pairs.chosen.ratios, beta * pairs.rejected.ratios
    margin = chosen - rejected
    losses = _smoothed(margin, label_smoothing)
    return sequences.value_of_pairs(losses, pairs, (chosen, rejected))


@preference_loss(needs_reference=True)
def ipo_loss(sequences: ScoredSequences, beta: float = 0.1) -> PreferenceValue:
    """Computes (margin - 1 / (2 beta))^2 for each pair; the gradient vanishes at the target margin.

    Scores are means over the tokens of an answer, as the authors define them; with loss.aggregation=seq-mean-token-sum
    they are sums.

    Args:
        beta: Parameter tau of the paper: the larger, the smaller the target margin.

    Source: Azar et al. 2023, equation 17.
    """
    pairs = sequences.pairs()
    chosen, rejected = pairs.chosen.ratios, pairs.rejected.ratios
    losses = (chosen - rejected - 1 / (2 * beta)).square()
    return sequences.value_of_pairs(losses, pairs, (beta * chosen, beta * rejected))


@preference_loss(needs_reference=False)
def simpo_loss(
    sequences: ScoredSequences, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0
) -> PreferenceValue:
    """Computes -log sigmoid(beta x (chosen score - rejected score) - gamma) for each pair, without a reference model.

    Scores are means over the tokens of an answer.

    Args:
        beta: Scale of the rewards.
        gamma: Target margin between the rewards of a pair, `simpo_gamma` in TRL.
        label_smoothing: Share of pairs whose preference is assumed to be reversed.

    Source: Meng, Xia and Chen 2024, equation 6.
    """
    pairs = sequences.pairs()
    chosen, rejected = beta * pairs.chosen.scores, beta * pairs.rejected.scores
    margin = chosen - rejected - gamma
    losses = _smoothed(margin, label_smoothing)
    return sequences.value_of_pairs(losses, pairs, (chosen, rejected))


@preference_loss(needs_reference=False)
def orpo_loss(sequences: ScoredSequences, beta: float = 0.1, nll_coefficient: float = 1.0) -> PreferenceValue:
    """Computes the chosen answer's negative log-likelihood plus -log sigmoid of the log odds ratio, for each pair.

    Scores are means over the tokens of an answer, and so are both summands. No reference model is needed.

    Args:
        beta: Weight of the odds ratio, the paper's lambda.
        nll_coefficient: Weight of the likelihood, 1 in the paper. To give the likelihood its own aggregation, set this
            to 0 and add a side term such as `{function: next_token, aggregation: token-mean}`; side terms see chosen
            answers only.

    Source: Hong, Lee and Thorne 2024, equations 4 to 7.
    """
    pairs = sequences.pairs()
    chosen, rejected = pairs.chosen.scores, pairs.rejected.scores
    log_odds = (chosen - _log1mexp(chosen)) - (rejected - _log1mexp(rejected))
    losses = -nll_coefficient * chosen - beta * logsigmoid(log_odds)
    return sequences.value_of_pairs(losses, pairs, (beta * chosen, beta * rejected))


def _smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    """Computes -log sigmoid(margin) for each pair, assuming that a share of the preferences is reversed."""
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def _log1mexp(scores: Tensor) -> Tensor:
    """Computes log(1 - exp(score)), accurate for scores near 0 and far from 0.

    Source: Maechler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    near_zero = scores > -math.log(2)
    # `where` differentiates both branches, so each gets a harmless input where the other one is used
    small, large = torch.where(near_zero, scores, -1.0), torch.where(near_zero, -1.0, scores)
    return torch.where(near_zero, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))


@preference_loss(needs_reference=False, scores_by_head=True)
def reward_model_loss(sequences: ScoredSequences, center_rewards_coefficient: float = 0.0) -> PreferenceValue:
    """Computes -log sigmoid(chosen - rejected - margin) for each pair.

    This is the negative log-likelihood of the preferences under the Bradley-Terry model, with the outputs of the head
    as strengths.

    Args:
        center_rewards_coefficient: Coefficient of an additional summand (chosen + rejected)^2, which pulls the mean of
            the rewards of a pair towards 0; the likelihood fixes only their difference.

    Source: Ouyang et al. 2022, equation 1; margins as in Touvron et al. 2023 (Llama 2), equation 2; centering as in
    Eisenstein et al. 2023, equation 2. Names as in TRL's RewardTrainer.
    """
    pairs = sequences.pairs()
    chosen, rejected = pairs.chosen.scores, pairs.rejected.scores
    losses = -logsigmoid(chosen - rejected - pairs.chosen.margins)
    losses = losses + center_rewards_coefficient * (chosen + rejected) ** 2
    return sequences.value_of_pairs(losses, pairs, (chosen, rejected))


@preference_loss(needs_reference=True, couples_groups=True)
def kto_loss(
    sequences: ScoredSequences,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    kl: bool = True,
) -> PreferenceValue:
    """Computes 1 - sigmoid(beta x (ratio - z)) of chosen answers and 1 - sigmoid(beta x (z - ratio)) of rejected ones.

    The sum of both is divided by the sum of the weights of all answers.

    z is the distance of the model from the reference: the mean log ratio of the mismatched sequences in the global
    batch, at least 0 and without a gradient.

    Args:
        beta: Inverse temperature: the larger, the closer the model stays to the reference.
        desirable_weight: Factor of the losses of chosen answers.
        undesirable_weight: Factor of the losses of rejected answers.
        kl: Whether z is measured; if False, z is 0 and mismatched sequences are not needed.

    Raises:
        DataError: `kl` is True, but the batch has no mismatched sequence.

    Source: Ethayarajh et al. 2024, equation 8; without z the unpaired form of D'Oosterlinck et al. 2024, equation 7.
    """
    chosen, rejected, mismatched = (sequences.of(role) for role in ("chosen", "rejected", "mismatched"))
    shares = torch.zeros_like(sequences.weights)
    for answers in (chosen, rejected):
        shares = shares.index_put((answers.index,), answers.weights)
    baseline = torch.zeros_like(sequences.scores.sum()).detach()
    if kl and len(mismatched.index):
        baseline = mismatched.ratios.detach().mean().clamp(min=0)
    elif kl and shares.any():
        raise agreed_fault(
            "kto needs mismatched sequences to measure how far the model has moved, but the batch has none; give some "
            "with GroupMember(group, 'mismatched'), or set loss.options.kl=false"
        )
    losses = desirable_weight * chosen.weights @ (1 - torch.sigmoid(beta * (chosen.ratios - baseline)))
    losses = losses + undesirable_weight * rejected.weights @ (1 - torch.sigmoid(beta * (baseline - rejected.ratios)))
    rewards = {"chosen_reward": chosen, "rejected_reward": rejected}
    diagnostics = {
        name: (beta * role_answers.weights @ role_answers.ratios.detach(), role_answers.weights.sum())
        for name, role_answers in rewards.items()
    }
    return PreferenceValue(losses, shares, diagnostics | {"kl": (baseline, torch.ones_like(baseline))})
