"""Loss functions of a user, as the configuration names them: right ones and wrong ones."""

import torch

from mtrain.loss.pair import LossPair, TermInputs, weigh


def focal_loss(inputs: TermInputs, gamma: float) -> LossPair:
    """(1 - p)^gamma times the cross entropy: non-linear in the token's loss, linear over tokens."""
    entropy = inputs.logits.cross_entropy(inputs.labels)
    return weigh((1 - torch.exp(-entropy)) ** gamma * entropy, inputs)


def hard_tokens(inputs: TermInputs, above: float) -> LossPair:
    """The mean over tokens whose loss is above a threshold: which they are is known after the forward pass only."""
    entropy = inputs.logits.cross_entropy(inputs.labels)
    kept = (entropy.detach() > above) & (inputs.weights != 0)
    return LossPair(torch.where(kept, entropy, 0.0).sum(), kept.sum(dtype=torch.float64))


def double_counting(inputs: TermInputs) -> LossPair:
    """Counts the tokens of every microbatch twice, as a sum over replicas does."""
    numerator, denominator = weigh(inputs.logits.cross_entropy(inputs.labels), inputs)
    return LossPair(numerator, 2 * denominator)


def negative(inputs: TermInputs) -> LossPair:
    """A denominator below 0."""
    numerator, denominator = weigh(inputs.logits.cross_entropy(inputs.labels), inputs)
    return LossPair(numerator, -denominator)


def not_a_number(inputs: TermInputs) -> LossPair:
    """A numerator that is nan on the ranks that hold a token of id 3."""
    numerator, denominator = weigh(inputs.logits.cross_entropy(inputs.labels), inputs)
    return LossPair(torch.where((inputs.tokens == 3).any(), torch.nan, numerator), denominator)


def times(inputs: TermInputs, factor: float) -> LossPair:
    """A loss as large as one likes."""
    numerator, denominator = weigh(inputs.logits.cross_entropy(inputs.labels), inputs)
    return LossPair(numerator * factor, denominator)
