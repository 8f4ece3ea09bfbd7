"""What grouped-query attention multiplies its scores by."""

from __future__ import annotations

import math

from mtrain.config.schema.model import ModelSection
from mtrain.mcore.model.rotary.frequencies import inverse_frequencies


def softmax_scale(model: ModelSection) -> float:
    """query_scalar ** -0.5, by default 1/sqrt(head_dim), times the square of yarn's attention factor.

    yarn multiplies cos and sin, hence the rotated query and the rotated key, by the factor; their product carries it
    twice.
    """
    return inverse_frequencies(model.rope, model.head_size)[1] ** 2 / _divisor(model)


def windowed_softmax_scale(model: ModelSection) -> float:
    """The same of layers with a sliding window: where they rotate by a base of their own, yarn has no part in it."""
    return softmax_scale(model) if model.rope.local_base is None else 1.0 / _divisor(model)


def _divisor(model: ModelSection) -> float:
    return math.sqrt(model.head_size if model.query_scalar is None else model.query_scalar)
