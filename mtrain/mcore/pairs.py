"""Loss pairs on their way through a step: added over microbatches, then summed over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.loss.pair import LossPair
from mtrain.mcore.groups import Groups


class PairAccumulator:
    """Sums the pairs of all microbatches of a step on the device, in float64, without a host synchronisation."""

    def __init__(self, terms: Sequence[str], device: torch.device) -> None:
        self.terms = tuple(terms)
        self.sums = torch.zeros(len(self.terms), 2, dtype=torch.float64, device=device)
        """[terms, 2]: numerator, denominator."""
        self._places = list(zip(self.terms, *self.sums.unbind(1)))

    def add(self, pairs: Mapping[str, LossPair]) -> None:
        """Adds one microbatch; keeps nothing that could change later."""
        for term, numerator, denominator in self._places:
            numerator.add_(pairs[term].numerator.detach())
            denominator.add_(pairs[term].denominator)


@dataclass(frozen=True)
class TermTotals:
    """One term over the global batch."""

    numerator: float
    denominator: float
    planned: float
    """The denominator that the batches promised."""


class GlobalTotals:
    """Every rank's sums added up by one all-reduce over the world, started at once and awaited when read.

    Loss pairs count on the last pipeline stage and planned denominators on the first, once for each replica of the
    data (`Groups.owns_loss`, `Groups.owns_plan`); all other ranks add zeros. So the same collective sums over DP x CP
    and spreads the result over TP and PP, and every rank sees the same bits.
    """

    def __init__(self, pairs: PairAccumulator, planned: Sequence[float], flag: bool, groups: Groups) -> None:
        """Args:
        pairs: This rank's sums.
        planned: The denominator of each term over this rank's batch.
        flag: Any rank's true makes `flag` true on all.
        groups: The process groups.
        """
        nothing, count = [0.0] * len(pairs.terms), len(pairs.terms)
        host = [*nothing, *nothing, *(planned if groups.owns_plan else nothing), float(flag)]
        self._vector = _on_device(host, groups.device)
        if groups.owns_loss:
            self._vector[: 2 * count].copy_(pairs.sums.view(-1))
        self._terms = pairs.terms
        self._work = dist.all_reduce(self._vector, async_op=True) if dist.get_world_size() > 1 else None

    def _wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._vector

    def main_denominator(self) -> Tensor:
        """The first term's measured denominator: float64 scalar on the device."""
        return self._wait()[1]

    def read(self, *beside: Tensor) -> HostTotals:
        """Everything on the host. One device synchronisation.

        Args:
            beside: Scalars on the device that are wanted on the host as well.
        """
        count = len(self._terms)
        vector = torch.cat((self._wait(), *(scalar.double().view(1) for scalar in beside))) if beside else self._wait()
        values = vector.tolist()
        totals = {
            term: TermTotals(values[2 * index], values[2 * index + 1], values[2 * count + index])
            for index, term in enumerate(self._terms)
        }
        return HostTotals(totals, values[3 * count] > 0, values[3 * count + 1 :])


class HostTotals(NamedTuple):
    """What all ranks read."""

    terms: dict[str, TermTotals]
    flag: bool
    beside: list[float]


class PlannedTotals:
    """Every term's denominator over the global batch, as the batches promise it before the forward pass.

    One all-reduce over the world, started at once and awaited when used. The first pipeline stage knows its plan, once
    for each replica of the data (`Groups.owns_plan`); all other ranks add zeros.
    """

    def __init__(self, planned: Sequence[float], groups: Groups) -> None:
        """Args:
        planned: The denominator of each term over this rank's batch.
        groups: The process groups.
        """
        self._vector = _on_device(planned if groups.owns_plan else [0.0] * len(planned), groups.device)
        self._work = dist.all_reduce(self._vector, async_op=True) if dist.get_world_size() > 1 else None

    def on_device(self) -> Tensor:
        """[terms] float64."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._vector


def _on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """A float64 vector; the host does not wait for the copy."""
    vector = torch.tensor(values, dtype=torch.float64)
    return vector if device.type == "cpu" else vector.pin_memory().to(device, non_blocking=True)
