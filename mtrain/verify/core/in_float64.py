"""A training step in float64 at the run's own weights.

Layers that normalise small vectors amplify rounding by a factor that depends on the weights, so no bound separates a
fault from float32 rounding. Float64 has 29 more bits: its amplified rounding stays far below the last digit of float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mtrain.config import Config
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.engine.sharded_model import ShardedModel
from mtrain.core.layers.build import unwrap
from mtrain.core.ranks.groups import Groups


def without_gathers(config: Config) -> Config:
    """Returns a configuration without parameter gathers in the forward pass."""
    return config.model_copy(update={"train": config.train.model_copy(update={"overlap_param_gather": False})})


class NeverUpdates(Optimizer):
    """Optimizer that never updates; those of megatron-core do not support float64."""

    def __init__(self, sharded: ShardedModel, groups: Groups) -> None:
        self.sharded, self._device, self.scales_loss = sharded, groups.device, False

    def zero_grad(self) -> None:
        """Clears the gradients."""
        self.sharded.zero_grad()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns the loss unscaled."""
        return loss

    def local_grad_norm_sq(self) -> Tensor:
        """Returns 0: a run reports the norm of its own gradients."""
        return torch.zeros((), dtype=torch.float64, device=self._device)


@torch.no_grad()
def copy_weights(chunks: Sequence[nn.Module], source: Sequence[nn.Module]) -> None:
    """Copies this rank's weights and expert biases to chunks of another precision."""
    for to, origin in zip(map(unwrap, chunks), map(unwrap, source), strict=True):
        values = dict(origin.named_parameters()) | dict(origin.named_buffers())
        for name, place in (*to.named_parameters(), *to.named_buffers()):
            place.copy_(values[name])
