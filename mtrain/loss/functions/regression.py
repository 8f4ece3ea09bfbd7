"""Regression on whole sequences by a head."""

from mtrain.loss.diagnostics import diagnosed, reports
from mtrain.loss.pair import LossPair, TermInputs, needs_extras, per_token, weigh


@per_token
@needs_extras("label")
@reports("absolute_error")
def regression_loss(inputs: TermInputs) -> LossPair:
    """Weighs and sums the squared error of the head's number at each sequence's last token, the only one with a weight.

    Args:
        inputs: One microbatch; the logits are the head's one number, the extra `label` is the target.
    """
    # of a single number: log(exp(x)) = x exactly, as exponentials are relative to the largest one
    errors = inputs.logits.logsumexp() - inputs.extras["label"]
    return diagnosed(weigh(errors.square(), inputs), inputs, {"absolute_error": errors.abs()})
