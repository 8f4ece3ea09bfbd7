"""Identity preference optimization."""

from mtrain.loss.preference.scores import PreferenceValue, ScoredSequences, preference_loss


@preference_loss(needs_reference=True)
def ipo_loss(sequences: ScoredSequences, beta: float = 0.1) -> PreferenceValue:
    """Computes (margin - 1 / (2 beta)) squared of each pair: the gradient vanishes at the margin that is aimed at.

    Scores are means over an answer's tokens, as the authors define them; with loss.aggregation=seq-mean-token-sum they
    are sums.

    Args:
        sequences: Chosen and rejected sequences, in pairs.
        beta: Parameter tau of the paper: the larger it is, the smaller the margin that is aimed at.

    Source: Azar et al. 2023, equation 17.
    """
    pairs = sequences.pairs()
    chosen, rejected = pairs.chosen.ratios, pairs.rejected.ratios
    losses = (chosen - rejected - 1 / (2 * beta)).square()
    return sequences.value_of_pairs(losses, pairs, (beta * chosen, beta * rejected))
