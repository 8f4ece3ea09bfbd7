"""Next-token loss: the main term of pretraining and finetuning."""

from mtrain.loss.pair import LossPair, TermInputs, weigh


def next_token_loss(inputs: TermInputs) -> LossPair:
    """Weighs and sums the cross entropy of the labels.

    Two all-reduces over the tensor-parallel group (none where another term of the microbatch made them).

    Args:
        inputs: One microbatch. All weights may be 0; the numerator is then exactly 0 and so is its gradient.
    """
    return weigh(inputs.logits.cross_entropy(inputs.labels), inputs)
