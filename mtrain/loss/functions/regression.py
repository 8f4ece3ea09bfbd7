"""Numbers of whole sequences, by a head."""

from mtrain.loss.diagnostics import diagnosed, reports
from mtrain.loss.pair import LossPair, TermInputs, needs_extras, per_token, weigh


@per_token
@needs_extras("label")
@reports("absolute_error")
def regression_loss(inputs: TermInputs) -> LossPair:
    """The squared error of the head's number at a sequence's last token, the one that has a weight.

    Args:
        inputs: Logits are the one number, the extra `label` is what it has to be.
    """
    # of one number alone: log(exp(x)) = x, to the bit, as exponentials are relative to the largest one
    errors = inputs.logits.logsumexp() - inputs.extras["label"]
    return diagnosed(weigh(errors.square(), inputs), inputs, {"absolute_error": errors.abs()})
