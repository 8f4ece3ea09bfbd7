"""Classification of whole sequences by a head."""

from mtrain.loss.diagnostics import diagnosed, reports
from mtrain.loss.pair import LossPair, TermInputs, per_token, weigh


@per_token
@reports("accuracy")
def classification_loss(inputs: TermInputs, label_smoothing: float = 0.0) -> LossPair:
    """Weighs and sums the cross entropy of each sequence's class at its last token, the only one with a weight.

    Args:
        inputs: One microbatch; the logits are those of the classes, the labels are the classes.
        label_smoothing: Share of the target that is spread evenly over all classes.
    """
    losses = inputs.logits.cross_entropy(inputs.labels, label_smoothing)
    pair = weigh(losses, inputs)
    return diagnosed(pair, inputs, {"accuracy": inputs.logits.is_largest(inputs.labels).double()})
