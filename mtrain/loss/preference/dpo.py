"""Direct preference optimization."""

from torch.nn.functional import logsigmoid

from mtrain.loss.preference.scores import PreferenceValue, ScoredSequences, preference_loss


@preference_loss(needs_reference=True)
def dpo_loss(sequences: ScoredSequences, beta: float = 0.1, label_smoothing: float = 0.0) -> PreferenceValue:
    """Computes -log sigmoid(beta x margin) of each pair.

    The margin is the log ratio of model to reference model of the chosen answer, minus that of the rejected answer.

    Scores are sums over an answer's tokens; with loss.aggregation=seq-mean-token-mean they are means, which is
    length-normalised DPO.

    Args:
        sequences: Chosen and rejected sequences, in pairs.
        beta: Inverse temperature: the larger it is, the nearer the model stays to the reference.
        label_smoothing: Share of pairs whose preference is assumed to be reversed (conservative DPO).

    Source: Rafailov et al. 2023, equation 7; label smoothing as in Mitchell 2023 (cDPO).
    """
    pairs = sequences.pairs()
    chosen, rejected = beta * pairs.chosen.ratios, beta * pairs.rejected.ratios
    margin = chosen - rejected
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return sequences.value_of_pairs(losses, pairs, (chosen, rejected))
