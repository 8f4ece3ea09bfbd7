"""Loss functions of a user, as the configuration names them: correct and faulty ones."""

import torch
from torch.nn.functional import logsigmoid

from mtrain.core.loss.pair import LossPair, TermInputs, weigh, weigh_sequences


def focal_loss(inputs: TermInputs, gamma: float) -> LossPair:
    """Computes (1 - p)^gamma times the cross entropy: non-linear in the token's loss, linear over tokens."""
    entropy = inputs.logits.cross_entropy(inputs.labels)
    return weigh((1 - torch.exp(-entropy)) ** gamma * entropy, inputs)


def preference(inputs: TermInputs, slope: float) -> LossPair:
    """Computes -log sigmoid of each sequence's log probability, shifted and flattened: not linear in its tokens."""
    score = inputs.sum_over_sequence(-inputs.logits.cross_entropy(inputs.labels))
    return weigh_sequences(-logsigmoid(slope * score + 1.0), inputs)


def squared_sum(inputs: TermInputs) -> LossPair:
    """Squares each sequence's loss, as every token's share of it: N is a sum over the tokens of all ranks."""
    losses = inputs.logits.cross_entropy(inputs.labels)
    total = inputs.sum_over_sequence(losses)[inputs.sequence_ids]
    return weigh(1e-3 * total.float() * losses, inputs)


def split_preference(inputs: TermInputs, slope: float) -> LossPair:
    """Computes `preference` wrongly: each context-parallel rank judges only the tokens that it holds."""
    kept = torch.where(inputs.weights != 0, inputs.logits.cross_entropy(inputs.labels), 0.0)
    return weigh_sequences(-logsigmoid(1.0 - slope * kept.sum(dim=1)), inputs)


def hard_tokens(inputs: TermInputs, above: float) -> LossPair:
    """Averages over tokens whose loss is above a threshold: only the forward pass shows which."""
    entropy = inputs.logits.cross_entropy(inputs.labels)
    kept = (entropy.detach() > above) & (inputs.weights != 0)
    return LossPair(torch.where(kept, entropy, 0.0).sum(), kept.sum(dtype=torch.float64))


def double_counting(inputs: TermInputs) -> LossPair:
    """Counts the tokens of every microbatch twice, as a sum over replicas does."""
    numerator, denominator = weigh(inputs.logits.cross_entropy(inputs.labels), inputs)
    return LossPair(numerator, 2 * denominator)


def negative(inputs: TermInputs) -> LossPair:
    """Returns a denominator below 0."""
    numerator, denominator = weigh(inputs.logits.cross_entropy(inputs.labels), inputs)
    return LossPair(numerator, -denominator)


def not_a_number(inputs: TermInputs) -> LossPair:
    """Returns a numerator that is nan on the ranks that hold a token of id 3."""
    numerator, denominator = weigh(inputs.logits.cross_entropy(inputs.labels), inputs)
    return LossPair(torch.where((inputs.tokens == 3).any(), torch.nan, numerator), denominator)


def times(inputs: TermInputs, factor: float) -> LossPair:
    """Multiplies the loss by any factor."""
    numerator, denominator = weigh(inputs.logits.cross_entropy(inputs.labels), inputs)
    return LossPair(numerator * factor, denominator)
