"""Implementation of the faults of adapters, each as a collaborator of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mtrain.mcore.engine.optimizer import Optimizer, Update
from mtrain.mcore.model.adapters.adapter import Adapter
from mtrain.mcore.model.adapters.linear import LinearAdapter
from mtrain.verify.planted.collaborators import Collaborators, become, configured, modules


class _SummedAgain(LinearAdapter):
    def _same_gradient(self, narrow: Tensor) -> Tensor:
        return super()._same_gradient(super()._same_gradient(narrow))


class _NormsOfRank(LinearAdapter):
    def _over_ranks(self, squares: Tensor) -> Tensor:
        return squares


def _all_become(kind: type[LinearAdapter]) -> Callable[[Sequence[nn.Module]], None]:
    def change(chunks: Sequence[nn.Module]) -> None:
        for adapter in modules(chunks, LinearAdapter):
            if type(adapter) is LinearAdapter:  # no subclass, such as one that returns a matrix
                become(adapter, kind)

    return change


def _not_marked(chunks: Sequence[nn.Module]) -> None:
    for parameter in (each for adapter in modules(chunks, Adapter) for each in adapter.parameters()):
        marked: Any = parameter
        marked.sequence_parallel = False


class _FrozenDecayed(Optimizer):
    @torch.no_grad()
    def update(self, lr: float, grad_norm: float) -> Update:
        for parameter in (each for chunk in self.chunks for each in chunk.parameters() if not each.requires_grad):
            parameter.mul_(1 - lr * self._weight_decay)
        return super().update(lr, grad_norm)


ADAPTER_PLANTS: dict[str, Collaborators] = {
    "adapter-gradient-times-tp": Collaborators(change_model=_all_become(_SummedAgain)),
    "adapter-gradient-not-reduced": Collaborators(change_model=_not_marked),
    "adapter-scale-dropped": Collaborators(
        config=configured("adapter", lambda section: {"alpha": section.alpha / section.scale})
    ),
    "magnitude-by-tp-rank": Collaborators(change_model=_all_become(_NormsOfRank)),
    "frozen-weights-decayed": Collaborators(optimizer=_FrozenDecayed),
}
