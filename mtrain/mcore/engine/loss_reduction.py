"""Loss pairs on their way through a step: added over microbatches, then summed over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.loss.pair import LossPair
from mtrain.mcore.distributed.all_reduce import AsyncAllReduce
from mtrain.mcore.distributed.groups import Groups


class PairAccumulator:
    """Sums the pairs of all microbatches of a step on the device, in float64, without a host synchronisation."""

    def __init__(self, terms: Sequence[str], device: torch.device, router_terms: Sequence[str] = ()) -> None:
        """Args:
        terms: Those that are computed from logits.
        device: Of the sums.
        router_terms: Those that routers compute inside the layers.
        """
        self.terms = (*terms, *router_terms)
        self.sums = torch.zeros(len(self.terms), 2, dtype=torch.float64, device=device)
        """[terms, 2]: numerator, denominator."""
        self._of_logits, self._of_routers = self.sums[: len(terms)], self.sums[len(terms) :]
        self._places = list(zip(terms, *self._of_logits.unbind(1)))

    def add(self, pairs: Mapping[str, LossPair]) -> None:
        """Adds one microbatch; keeps nothing that could change later."""
        for term, numerator, denominator in self._places:
            numerator.add_(pairs[term].numerator.detach())
            denominator.add_(pairs[term].denominator)

    def add_router(self, numerators: Tensor, denominators: Tensor) -> None:
        """Adds what one router saw of one microbatch, [router_terms] each."""
        self._of_routers.add_(torch.stack((numerators.detach(), denominators), dim=1))

    def owned(self, groups: Groups) -> Tensor:
        """[terms, 2] of which the sum over all ranks is that of the global batch.

        Pairs of logits are the same on ranks that share them (`Groups.counts_loss`). Of a router's pairs each rank has
        those of its own layers and tokens.
        """
        return self.sums if groups.counts_loss else torch.cat((torch.zeros_like(self._of_logits), self._of_routers))


@dataclass(frozen=True)
class TermTotals:
    """One term over the global batch."""

    numerator: float
    denominator: float
    planned: float
    """The denominator that the batches promised."""


class TokenCounts(NamedTuple):
    """Positions of a batch, counted on the host by the ranks that read it."""

    padding: int = 0
    """Without text."""
    loss: int = 0
    """That the main term counts."""


NO_TOKENS = TokenCounts()
"""Of a rank that reads nothing, or where nobody asks."""


class GlobalTotals:
    """Every rank's sums added up by one collective over the world, the one that the gradient norm needs anyway.

    Loss pairs count where they are owned (`PairAccumulator.owned`), planned denominators and tokens on the first
    pipeline stage, once for each replica of the data (`Groups.counts_plan`); all other ranks add zeros. So the same
    collective sums over DP x CP and spreads the result over TP and PP, and every rank sees the same bits.
    """

    def __init__(
        self,
        pairs: PairAccumulator,
        planned: Sequence[float],
        stop_requested: bool,
        groups: Groups,
        local_grad_norm_sq: Tensor | None = None,
        tokens: TokenCounts = NO_TOKENS,
    ) -> None:
        """Args:
        pairs: This rank's sums.
        planned: The denominator of each term over this rank's batch.
        stop_requested: Any rank's true makes `stop_requested` true on all.
        groups: The process groups.
        local_grad_norm_sq: A scalar on the device, summed over all ranks: this rank's part of a squared norm.
        tokens: Of this rank's batch.
        """
        nothing, count = [0.0] * len(pairs.terms), len(pairs.terms)
        of_batch = [*planned, *tokens] if groups.counts_plan else [*nothing, *NO_TOKENS]
        host = [*nothing, *nothing, *of_batch, float(stop_requested)]
        vector = _on_device(host if local_grad_norm_sq is None else [*host, 0.0], groups.device)
        vector[: 2 * count].copy_(pairs.owned(groups).view(-1))
        if local_grad_norm_sq is not None:
            vector[-1].copy_(local_grad_norm_sq)
        self._terms = pairs.terms
        self._sum = AsyncAllReduce(vector)

    def main_denominator(self) -> Tensor:
        """The first term's measured denominator: float64 scalar on the device."""
        return self._sum.get()[1]

    def read(self) -> HostTotals:
        """Everything on the host. One device synchronisation."""
        count, values = len(self._terms), self._sum.get().tolist()
        totals = {
            term: TermTotals(values[2 * index], values[2 * index + 1], values[2 * count + index])
            for index, term in enumerate(self._terms)
        }
        padding, loss, stop_requested, *norm_sq = values[3 * count :]
        counts = TokenCounts(int(padding), int(loss))
        return HostTotals(totals, stop_requested > 0, norm_sq[0] if norm_sq else None, counts)


class HostTotals(NamedTuple):
    """What all ranks read."""

    terms: dict[str, TermTotals]
    stop_requested: bool
    local_grad_norm_sq: float | None
    """None where none were given."""
    tokens: TokenCounts
    """Of the global batch."""


class PlannedTotals:
    """Every term's denominator over the global batch, as the batches promise it before the forward pass.

    One collective, started at once and awaited when used. Each row of the batch is counted by one rank that reads it;
    all other ranks add zeros.
    """

    def __init__(self, planned: Sequence[float], groups: Groups, everywhere: bool) -> None:
        """Args:
        planned: The denominator of each term over this rank's batch.
        groups: The process groups.
        everywhere: Over the world, with the same bits on all ranks; else within each pipeline stage, whose ranks read
            the whole batch themselves.
        """
        owns = groups.counts_plan if everywhere else groups.tp_rank == groups.cp_rank == 0
        own = planned if owns else [0.0] * len(planned)
        self._sum = AsyncAllReduce(_on_device(own, groups.device), None if everywhere else groups.stage)

    def on_device(self) -> Tensor:
        """[terms] float64."""
        return self._sum.get()


def _on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """A float64 vector; the host does not wait for the copy."""
    vector = torch.tensor(values, dtype=torch.float64)
    return vector if device.type == "cpu" else vector.pin_memory().to(device, non_blocking=True)
