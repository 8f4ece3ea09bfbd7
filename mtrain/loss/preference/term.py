"""The terms that a preference loss sends through the model a second time."""

from mtrain.loss.pair import LossPair, TermInputs, per_token, weigh


@per_token
def score_term(inputs: TermInputs) -> LossPair:
    """Weighs and sums the log-probabilities of the labels.

    With each sequence's weights multiplied by the derivative of the loss by its score, this has the gradient of the
    loss; its value is another number.
    """
    return weigh(-inputs.logits.cross_entropy(inputs.labels), inputs)


@per_token
def head_term(inputs: TermInputs) -> LossPair:
    """As `score_term`, where a head of one label gives the scores."""
    # of one number alone: log(exp(x)) = x, to the bit, as exponentials are relative to the largest one
    return weigh(inputs.logits.logsumexp(), inputs)
