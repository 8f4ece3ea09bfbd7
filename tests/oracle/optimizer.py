"""AdamW with decoupled weight decay and global-norm clipping, in float64, one tensor at a time."""

import math

import torch
from torch import Tensor

from mtrain.config.schema.train import AdamWSection
from tests.oracle.model import Parameters


class AdamW:
    """AdamW with its moments; the caller gives the learning rate of each step.

    Source: Loshchilov and Hutter 2019, algorithm 2, the decay multiplied by the learning rate.
    """

    def __init__(self, section: AdamWSection) -> None:
        self.section = section
        self.num_updates = 0
        self.first: Parameters = {}
        self.second: Parameters = {}

    def updated(self, parameters: Parameters, gradients: Parameters, lr: float) -> Parameters:
        """Returns the parameters after one step; the arguments stay as they are."""
        self.num_updates += 1
        scale = self._clipping(gradients)
        return {name: self._updated(name, value, gradients[name] * scale, lr) for name, value in parameters.items()}

    def _clipping(self, gradients: Parameters) -> float:
        """Returns the factor of all gradients that brings their global norm to at most clip_grad."""
        norm = global_norm(gradients)
        return self.section.clip_grad / norm if 0 < self.section.clip_grad < norm else 1.0

    def _updated(self, name: str, value: Tensor, gradient: Tensor, lr: float) -> Tensor:
        beta1, beta2, step = self.section.beta1, self.section.beta2, self.num_updates
        nothing = torch.zeros_like(value)
        self.first[name] = beta1 * self.first.get(name, nothing) + (1 - beta1) * gradient
        self.second[name] = beta2 * self.second.get(name, nothing) + (1 - beta2) * gradient.square()
        mean = self.first[name] / (1 - beta1**step)
        variance = self.second[name] / (1 - beta2**step)
        decay = self.section.weight_decay if self._decays(name) else 0.0
        return value - lr * (mean / (variance.sqrt() + self.section.epsilon) + decay * value)

    def _decays(self, name: str) -> bool:
        return self.section.decay_norms_and_biases or not (
            name.endswith((".bias", ".softmax_offset")) or "norm" in name
        )


def global_norm(gradients: Parameters) -> float:
    """Returns the 2-norm of all gradients as one vector; a tied table counts once."""
    return math.sqrt(math.fsum(gradient.square().sum().item() for gradient in gradients.values()))
