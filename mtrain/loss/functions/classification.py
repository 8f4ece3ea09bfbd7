"""Classes of whole sequences, by a head."""

from mtrain.loss.diagnostics import diagnosed, reports
from mtrain.loss.pair import LossPair, TermInputs, per_token, weigh


@per_token
@reports("accuracy")
def classification_loss(inputs: TermInputs, label_smoothing: float = 0.0) -> LossPair:
    """Cross entropy of a sequence's class at its last token, the one that has a weight.

    Args:
        inputs: Logits are those of the classes, labels the classes.
        label_smoothing: Share of the target that is spread evenly over all classes.
    """
    losses = inputs.logits.cross_entropy(inputs.labels, label_smoothing)
    pair = weigh(losses, inputs)
    return diagnosed(pair, inputs, {"accuracy": inputs.logits.is_largest(inputs.labels).double()})
