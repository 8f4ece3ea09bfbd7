"""Kahneman-Tversky optimization: answers that are judged alone."""

import torch

from mtrain.loss.preference.scores import PreferenceValue, ScoredSequences, agreed_fault, preference_loss


@preference_loss(needs_reference=True, couples_groups=True)
def kto_loss(
    sequences: ScoredSequences,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    kl: bool = True,
) -> PreferenceValue:
    """Computes 1 - sigmoid(beta x (ratio - z)) of wanted answers and 1 - sigmoid(beta x (z - ratio)) of unwanted ones.

    Their sum is divided by the sum of the weights of all answers.

    z is the distance of the model from the reference: the mean log ratio of the global batch's mismatched sequences, at
    least 0 and without a gradient.

    Args:
        sequences: Wanted, unwanted and mismatched sequences.
        beta: Inverse temperature: the larger it is, the nearer the model stays to the reference.
        desirable_weight: Factor of the losses of wanted answers.
        undesirable_weight: Factor of the losses of unwanted answers.
        kl: Whether z is measured; if not, it is 0 and mismatched sequences are not needed.

    Raises:
        DataError: z is to be measured, but no sequence is mismatched.

    Source: Ethayarajh et al. 2024, equation 8; without z the unpaired form of D'Oosterlinck et al. 2024, equation 7.
    """
    wanted, unwanted, moved = (sequences.of(role) for role in ("chosen", "rejected", "mismatched"))
    shares = torch.zeros_like(sequences.weights)
    for answers in (wanted, unwanted):
        shares = shares.index_put((answers.index,), answers.weights)
    baseline = torch.zeros_like(sequences.scores.sum()).detach()
    if kl and len(moved.index):
        baseline = moved.ratios.detach().mean().clamp(min=0)
    elif kl and shares.any():
        raise agreed_fault(
            "kto measures how far the model has moved by mismatched sequences, but the batch has none; give some with "
            "GroupMember(group, 'mismatched'), or set loss.options.kl=false"
        )
    losses = desirable_weight * wanted.weights @ (1 - torch.sigmoid(beta * (wanted.ratios - baseline)))
    losses = losses + undesirable_weight * unwanted.weights @ (1 - torch.sigmoid(beta * (baseline - unwanted.ratios)))
    rewards = {"chosen_reward": wanted, "rejected_reward": unwanted}
    diagnostics = {
        name: (beta * each.weights @ each.ratios.detach(), each.weights.sum()) for name, each in rewards.items()
    }
    return PreferenceValue(losses, shares, diagnostics | {"kl": (baseline, torch.ones_like(baseline))})
