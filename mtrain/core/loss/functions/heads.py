"""Losses of a head that judges whole sequences: classification and regression."""

from mtrain.core.loss.pair import LossPair, TermInputs, diagnosed, needs_extras, per_token, reports, weigh


@per_token
@reports("accuracy")
def classification_loss(inputs: TermInputs, label_smoothing: float = 0.0) -> LossPair:
    """Weighs and sums the cross entropy of each sequence's class at its last token, the only one with a weight.

    Args:
        inputs: One microbatch; logits and labels are those of classes.
        label_smoothing: Share of the target spread evenly over all classes.
    """
    losses = inputs.logits.cross_entropy(inputs.labels, label_smoothing)
    pair = weigh(losses, inputs)
    return diagnosed(pair, inputs, {"accuracy": inputs.logits.is_largest(inputs.labels).double()})


@per_token
@needs_extras("label")
@reports("absolute_error")
def regression_loss(inputs: TermInputs) -> LossPair:
    """Weighs and sums the squared error of the head's output at each sequence's last token, the only one with a weight.

    Args:
        inputs: One microbatch; the only logit is the head's output, the extra `label` is the target.
    """
    # for one logit log(exp(x)) = x exactly, since exponentials are relative to the largest one
    errors = inputs.logits.logsumexp() - inputs.extras["label"]
    return diagnosed(weigh(errors.square(), inputs), inputs, {"absolute_error": errors.abs()})
