"""Direct preference optimization."""

from torch.nn.functional import logsigmoid

from mtrain.loss.preference.scores import PreferenceValue, ScoredSequences, preference_loss


@preference_loss(needs_reference=True)
def dpo_loss(sequences: ScoredSequences, beta: float = 0.1, label_smoothing: float = 0.0) -> PreferenceValue:
    """-log sigmoid(beta x margin), where the margin is how much more likely than under the reference model the chosen
    answer is, less the same of the rejected one.

    Scores are sums over an answer's tokens; with loss.aggregation=seq-mean-token-mean they are means, which is
    length-normalised DPO.

    Args:
        sequences: Pairs.
        beta: Inverse temperature: the larger, the nearer the model stays to the reference.
        label_smoothing: Share of pairs whose preference is assumed to be the wrong way round (conservative DPO).

    Source: Rafailov et al. 2023, equation 7; label smoothing as in Mitchell 2023 (cDPO).
    """
    pairs = sequences.pairs()
    chosen, rejected = beta * pairs.chosen.ratios, beta * pairs.rejected.ratios
    margin = chosen - rejected
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return sequences.value_of_pairs(losses, pairs, (chosen, rejected))
