"""Diagnostics of loss functions on their way through a step: joined over microbatches, then over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mtrain.loss.diagnostics import Reported, joined, shown_name
from mtrain.loss.pair import LossPair
from mtrain.mcore.distributed.groups import Groups


class DiagnosticSums:
    """Diagnostics of one step on this rank; sent in the vector of all sums, so they cost no collective."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[str, Tensor] = {}

    def expect(self, reported: Reported) -> None:
        """Sets the names that this step reports, the same on all ranks; others are left out."""
        for name in reported.means:
            self._found.setdefault(name, torch.zeros(2, dtype=torch.float64, device=self._device))
        for name in reported.maxima:
            self._found.setdefault(name, torch.full((), -math.inf, dtype=torch.float64, device=self._device))

    def add(self, pairs: Mapping[str, LossPair]) -> None:
        """Adds the diagnostics of one microbatch."""
        for term, pair in pairs.items():
            for name, value in pair.diagnostics.items():
                key = shown_name(term, name)
                if key in self._found:
                    self._found[key] = joined(self._found[key], value)

    def size(self, world_size: int) -> int:
        """Returns the size of the vector."""
        return sum(2 if each.ndim else world_size for each in self._found.values())

    def vector(self, groups: Groups) -> Tensor:
        """Returns float64 of `size` numbers, to be summed over all ranks.

        A sum cannot find a maximum, so each rank has a number of its own in it.
        """
        parts = [torch.zeros(0, dtype=torch.float64, device=self._device)]
        for each in self._found.values():
            if each.ndim:
                parts.append(each if groups.counts_loss else torch.zeros_like(each))
                continue
            own = each.new_zeros(groups.layout.world_size)
            own[groups.rank] = each if groups.counts_loss else -math.inf
            parts.append(own)
        return torch.cat(parts)

    def read(self, summed: Sequence[float], world_size: int) -> dict[str, float]:
        """Reads values by name from the vector's sum; leaves out those that no token counted for."""
        result: dict[str, float] = {}
        for name, each in self._found.items():
            count = 2 if each.ndim else world_size
            own, summed = summed[:count], summed[count:]
            if each.ndim and own[1] != 0:
                result[name] = own[0] / own[1]
            elif not each.ndim and max(own) > -math.inf:
                result[name] = max(own)
        return result
