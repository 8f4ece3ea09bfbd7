"""AdamW in float64 from its definition, and the scale of its rounding in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtrain.config.schema.train import AdamWConstants

Arrays = dict[str, NDArray[Any]]

_CLIPPING_OFFSET = 1e-6
"""Summand added to the norm before clip_grad is divided by it, as in torch and Megatron-LM."""


class Updated(NamedTuple):
    """Weights after one step."""

    weights: Arrays
    scales: Arrays
    """Size of what float32 adds up for each element: |w| + lr x (moving mean of |gradient|) / (sqrt(v) + epsilon)."""


class Moments(NamedTuple):
    """State of Adam after some updates."""

    num_updates: int
    first: Arrays
    second: Arrays


class AdamW:
    """AdamW with clipping by a given global norm.

    Source: Loshchilov and Hutter 2019, algorithm 2, the decay multiplied by the learning rate.
    """

    def __init__(self, section: AdamWConstants, start: Moments = Moments(0, {}, {})) -> None:  # noqa: B008
        self._section = section
        self._num_updates = start.num_updates
        self._first = {name: np.asarray(value, np.float64) for name, value in start.first.items()}
        self._second = {name: np.asarray(value, np.float64) for name, value in start.second.items()}
        self._magnitude = {name: np.abs(value) for name, value in self._first.items()}

    def updated(self, weights: Mapping[str, Any], gradients: Mapping[str, Any], grad_norm: float, lr: float) -> Updated:
        """Makes one step for all tensors that have a gradient, and returns the new weights.

        Args:
            weights: Weights before the step.
            gradients: Normalised gradients before clipping.
            grad_norm: Norm by which the gradients are clipped.
            lr: Learning rate of this step.
        """
        self._num_updates += 1
        factor = clipping_factor(self._section.clip_grad, grad_norm)
        new: Arrays = {}
        scales: Arrays = {}
        for name, gradient in gradients.items():
            value, clipped = np.asarray(weights[name], np.float64), np.asarray(gradient, np.float64) * factor
            new[name], scales[name] = self._one(name, value, clipped, lr)
        return Updated(new, scales)

    def _one(
        self, name: str, value: NDArray[Any], gradient: NDArray[Any], lr: float
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        beta1, beta2, step = self._section.beta1, self._section.beta2, self._num_updates
        self._first[name] = beta1 * self._first.get(name, 0.0) + (1 - beta1) * gradient
        self._magnitude[name] = beta1 * self._magnitude.get(name, 0.0) + (1 - beta1) * np.abs(gradient)
        self._second[name] = beta2 * self._second.get(name, 0.0) + (1 - beta2) * gradient**2
        divisor = np.sqrt(self._second[name] / (1 - beta2**step)) + self._section.epsilon
        decays = value.ndim > 1 or self._section.decay_norms_and_biases
        decay = self._section.weight_decay if decays else 0.0
        new = value - lr * (self._first[name] / (1 - beta1**step) / divisor + decay * value)
        return new, np.abs(value) + lr * self._magnitude[name] / (1 - beta1**step) / divisor


def clipping_factor(clip_grad: float, grad_norm: float) -> float:
    """Returns the factor that clips gradients of this global norm; 1 if clip_grad = 0."""
    return min(1.0, clip_grad / (grad_norm + _CLIPPING_OFFSET)) if clip_grad > 0 else 1.0
