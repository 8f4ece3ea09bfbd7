"""The factor of the scores in grouped-query attention."""

from __future__ import annotations

import math

from mtrain.config.schema.model import ModelSection
from mtrain.mcore.model.rotary.frequencies import inverse_frequencies


def softmax_scale(model: ModelSection) -> float:
    """Returns query_scalar ** -0.5, or 1/sqrt(head_dim) where that is unset, times yarn's attention factor squared.

    yarn multiplies cos and sin, hence the rotated query and the rotated key, by the factor; their product contains it
    twice.
    """
    return inverse_frequencies(model.rope, model.head_size)[1] ** 2 / _divisor(model)


def windowed_softmax_scale(model: ModelSection) -> float:
    """Returns the scale of layers with a window: where they rotate by a base of their own, yarn plays no part."""
    return softmax_scale(model) if model.rope.local_base is None else 1.0 / _divisor(model)


def _divisor(model: ModelSection) -> float:
    return math.sqrt(model.head_size if model.query_scalar is None else model.query_scalar)
