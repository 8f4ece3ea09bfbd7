"""How each fault of `adapter_inject` is planted: one function is replaced while a run lasts."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from mtrain.config.schema.adapter import AdapterSection
from mtrain.mcore.engine import optimizer
from mtrain.mcore.model.adapters import linear
from mtrain.mcore.model.adapters.adapter import Adapter
from mtrain.verify.planted.planting import Plant, replaced


def _summed_again() -> contextlib.AbstractContextManager[None]:
    original = linear._same_gradient
    return replaced(linear, "_same_gradient", lambda narrow, group: original(original(narrow, group), group))


def _not_marked() -> contextlib.AbstractContextManager[None]:
    original = Adapter.add_parameter

    def faulty(self: Adapter, *arguments: Any, **options: Any) -> nn.Parameter:
        parameter: Any = original(self, *arguments, **options)
        parameter.sequence_parallel = False
        return parameter  # type: ignore[no-any-return]

    return replaced(Adapter, "add_parameter", faulty)


def _frozen_decayed() -> contextlib.AbstractContextManager[None]:
    original = optimizer.Optimizer.update

    @torch.no_grad()
    def faulty(self: optimizer.Optimizer, rate: float, grad_norm: float) -> optimizer.Update:
        for parameter in (each for chunk in self.chunks for each in chunk.parameters() if not each.requires_grad):
            parameter.mul_(1 - rate * self._weight_decay)
        return original(self, rate, grad_norm)

    return replaced(optimizer.Optimizer, "update", faulty)


ADAPTER_PLANTS: dict[str, Plant] = {
    "adapter-gradient-times-tp": _summed_again,
    "adapter-gradient-not-reduced": _not_marked,
    "adapter-scale-dropped": lambda: replaced(AdapterSection, "scale", property(lambda section: 1.0)),
    "magnitude-by-tp-rank": lambda: replaced(linear.LinearAdapter, "_over_ranks", lambda adapter, squares: squares),
    "frozen-weights-decayed": _frozen_decayed,
}
