"""Terms of the second pass through the model, which gives the gradient of a preference loss."""

from mtrain.loss.pair import LossPair, TermInputs, per_token, weigh


@per_token
def score_term(inputs: TermInputs) -> LossPair:
    """Weighs and sums the log-probabilities of the labels.

    If each sequence's weights are multiplied by the derivative of the loss with respect to its score, the gradient is
    that of the loss; the value is not.
    """
    return weigh(-inputs.logits.cross_entropy(inputs.labels), inputs)


@per_token
def head_term(inputs: TermInputs) -> LossPair:
    """Weighs and sums the scores that a head of one label gives; see `score_term`."""
    # of a single number: log(exp(x)) = x exactly, as exponentials are relative to the largest one
    return weigh(inputs.logits.logsumexp(), inputs)
