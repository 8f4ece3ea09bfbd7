"""Loss functions with one mistake each, named in configurations by tests."""

from typing import Any

import torch

from mtrain.core.loss.functions.likelihood import next_token_loss
from mtrain.core.loss.pair import LossPair, TermInputs

not_a_function = 3


def scaled(inputs: TermInputs, factor: float, shift: float = 0.0) -> LossPair:
    """Computes a correct loss, with an option that it needs and one that it does not."""
    pair = next_token_loss(inputs)
    return LossPair(pair.numerator * factor + shift, pair.denominator)


def mean(inputs: TermInputs) -> Any:
    return inputs.logits.cross_entropy(inputs.labels).mean()


def plain_tuple(inputs: TermInputs) -> Any:
    return tuple(next_token_loss(inputs))


def per_token(inputs: TermInputs) -> LossPair:
    return LossPair(inputs.logits.cross_entropy(inputs.labels), inputs.denominator_weights.sum())


def low_precision(inputs: TermInputs) -> LossPair:
    pair = next_token_loss(inputs)
    return LossPair(pair.numerator.bfloat16(), pair.denominator)


def counted_in_integers(inputs: TermInputs) -> LossPair:
    return LossPair(next_token_loss(inputs).numerator, (inputs.weights > 0).sum())


def python_number(inputs: TermInputs) -> LossPair:
    return LossPair(next_token_loss(inputs).numerator, 3.0)  # type: ignore[arg-type]


def differentiable_denominator(inputs: TermInputs) -> LossPair:
    pair = next_token_loss(inputs)
    return LossPair(pair.numerator, pair.numerator.double())


def without_a_graph(inputs: TermInputs) -> LossPair:
    return LossPair(torch.zeros(()), inputs.denominator_weights.sum())
