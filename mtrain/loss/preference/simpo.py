"""Simple preference optimization."""

from torch.nn.functional import logsigmoid

from mtrain.loss.preference.scores import PreferenceValue, ScoredSequences, preference_loss


@preference_loss(needs_reference=False)
def simpo_loss(
    sequences: ScoredSequences, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0
) -> PreferenceValue:
    """Computes -log sigmoid(beta x (chosen score - rejected score) - gamma) of each pair, without a reference model.

    Scores are means over an answer's tokens.

    Args:
        sequences: Chosen and rejected sequences, in pairs.
        beta: Scale of the rewards.
        gamma: Target margin between the rewards of a pair, `simpo_gamma` in TRL.
        label_smoothing: Share of pairs whose preference is assumed to be reversed.

    Source: Meng, Xia and Chen 2024, equation 6.
    """
    pairs = sequences.pairs()
    chosen, rejected = beta * pairs.chosen.scores, beta * pairs.rejected.scores
    margin = chosen - rejected - gamma
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return sequences.value_of_pairs(losses, pairs, (chosen, rejected))
