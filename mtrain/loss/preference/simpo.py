"""Simple preference optimization."""

from torch.nn.functional import logsigmoid

from mtrain.loss.preference.scores import PreferenceValue, ScoredSequences, preference_loss


@preference_loss(needs_reference=False)
def simpo_loss(
    sequences: ScoredSequences, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0
) -> PreferenceValue:
    """-log sigmoid(beta x (score of the chosen - score of the rejected answer) - gamma), without a reference model.

    Scores are means over an answer's tokens.

    Args:
        sequences: Pairs.
        beta: Scale of the rewards.
        gamma: Margin that the rewards of a pair should keep. TRL's `simpo_gamma`.
        label_smoothing: As in DPO.

    Source: Meng, Xia and Chen 2024, equation 6.
    """
    pairs = sequences.pairs()
    chosen, rejected = beta * pairs.chosen.scores, beta * pairs.rejected.scores
    margin = chosen - rejected - gamma
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return sequences.value_of_pairs(losses, pairs, (chosen, rejected))
