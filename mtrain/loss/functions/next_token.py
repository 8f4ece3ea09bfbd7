"""Next-token loss: the main term of pretraining and finetuning."""

from mtrain.loss.pair import LossPair, TermInputs, per_token, weigh


@per_token
def next_token_loss(inputs: TermInputs, label_smoothing: float = 0.0) -> LossPair:
    """Weighs and sums the cross entropy of the labels.

    Two all-reduces over the tensor-parallel group (none where another term of the microbatch made them).

    Args:
        inputs: One microbatch. All weights may be 0; the numerator is then exactly 0 and so is its gradient.
        label_smoothing: Share of the target that is spread evenly over all real tokens of the vocabulary, padding left
            out; 0 <= label_smoothing < 1.
    """
    return weigh(inputs.logits.cross_entropy(inputs.labels, label_smoothing), inputs)
