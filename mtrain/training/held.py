"""What an engine's training has changed, copied to the host: several models take turns on one engine."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mtrain.mcore.state.held import HeldOptimizer, HeldWeights
from mtrain.training.step import OpenStep


class Accumulated(NamedTuple):
    """Gradients of a step that is not finished."""

    open_step: OpenStep
    gradients: list[Tensor]
    tokens: int


class Held(NamedTuple):
    """Copy of this rank's part of what training changes, from `Engine.hold`."""

    weights: HeldWeights
    optimizer: HeldOptimizer | None = None
    """None: weights alone."""
    step: int = 0
    total_tokens: int = 0
    accumulated: Accumulated | None = None
    """None: no gradients since the last step."""
