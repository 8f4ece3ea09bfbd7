"""Entropy of the model's own distribution: with a negative coefficient it rewards undecided models."""

from mtrain.loss.pair import LossPair, TermInputs, per_token, weigh


@per_token
def entropy_loss(inputs: TermInputs) -> LossPair:
    """Weighs and sums the entropy of each token's distribution, in nats.

    One all-reduce over the tensor-parallel group if a next-token loss of the same logits is computed as well, else two.
    Labels play no role, but the weights do: a token without a loss has no entropy term either.
    """
    return weigh(inputs.logits.entropy(), inputs)
