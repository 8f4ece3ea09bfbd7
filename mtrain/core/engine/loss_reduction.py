"""Loss pairs on their way through a step: added over microbatches, then summed over all ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.base.heartbeat import tick
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.loss.pair import LossPair, Reported, joined, shown_name
from mtrain.core.ranks import patience
from mtrain.core.ranks.all_reduce import AsyncAllReduce
from mtrain.core.ranks.groups import Groups, to_device


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

    def vector(self, groups: Groups) -> Tensor:
        """Returns [n] float64, to be summed over all ranks.

        A sum cannot find a maximum, so a maximum takes one place for each rank, and a rank fills its own.
        """
        parts = [torch.zeros(0, dtype=torch.float64, device=self._device)]
        for sums in self._found.values():
            if sums.ndim:
                parts.append(sums if groups.counts_loss else torch.zeros_like(sums))
                continue
            own = sums.new_zeros(groups.layout.world_size)
            own[groups.rank] = sums if groups.counts_loss else -math.inf
            parts.append(own)
        return torch.cat(parts)

    def read(self, summed: Sequence[float], world_size: int) -> dict[str, float]:
        """Reads values by name from the vector's sum; leaves out those that no token counted for."""
        result: dict[str, float] = {}
        for name, sums in self._found.items():
            count = 2 if sums.ndim else world_size
            own, summed = summed[:count], summed[count:]
            if sums.ndim and own[1] != 0:
                result[name] = own[0] / own[1]
            elif not sums.ndim and max(own) > -math.inf:
                result[name] = max(own)
        return result


class PairAccumulator:
    """Sums the pairs of all microbatches of a step on the device, in float64, without a host synchronization."""

    def __init__(
        self, terms: Sequence[str], device: torch.device, router_terms: Sequence[str] = (), num_sources: int = 0
    ) -> None:
        """Takes the terms that are computed from logits, those that routers compute, and the number of sources by which
        the main term is reported."""
        self.terms = (*terms, *router_terms)
        self.diagnostics = DiagnosticSums(device)
        # float64: float32 holds integer counts of tokens only up to 2^24, and a step may have more.
        self.sums = torch.zeros(len(self.terms), 2, dtype=torch.float64, device=device)
        """[terms, 2]: numerators and denominators."""
        self.by_source = torch.zeros(2, num_sources, dtype=torch.float64, device=device)
        """[2, sources]: numerators, then denominators of the main term; nan where a microbatch gives none by source."""
        # Views, made once: a microbatch adds in place, without indexing or allocating.
        self._of_logits, self._of_routers = self.sums[: len(terms)], self.sums[len(terms) :]
        self._places = list(zip(terms, *self._of_logits.unbind(1)))

    def add(self, pairs: Mapping[str, LossPair]) -> None:
        """Adds one microbatch; keeps nothing that could change later."""
        tick()
        for term, numerator, denominator in self._places:
            # The sum holds a copy: megatron-core scales the loss in place afterwards (forward_step_calc_loss).
            numerator.add_(pairs[term].numerator.detach())
            denominator.add_(pairs[term].denominator)
        self.diagnostics.add(pairs)
        if self.by_source.numel():
            found = pairs[MAIN_TERM].by_source
            self.by_source.add_(math.nan if found is None else found)

    def add_router(self, numerators: Tensor, denominators: Tensor) -> None:
        """Adds the values of one router in one microbatch, [router_terms] each."""
        self._of_routers.add_(torch.stack((numerators.detach(), denominators), dim=1))

    def owned(self, groups: Groups) -> Tensor:
        """Returns [terms, 2] whose sum over all ranks is that of the global batch.

        Ranks that share pairs of logits hold the same; a router's pairs belong to the layers and tokens of each rank.
        """
        # zeros and not nothing: the vector has one length on all ranks
        return self.sums if groups.counts_loss else torch.cat((torch.zeros_like(self._of_logits), self._of_routers))

    def owned_by_source(self, groups: Groups) -> Tensor:
        """Returns [2, sources] whose sum over all ranks is that of the global batch."""
        return self.by_source if groups.counts_loss else torch.zeros_like(self.by_source)


@dataclass(frozen=True)
class Totals:
    """Sums of one term over a part of the global batch, or all of it."""

    numerator: float
    denominator: float

    @property
    def mean(self) -> float:
        """Returns numerator / denominator, in nats; 0 where there was nothing to learn."""
        return self.numerator / self.denominator if self.denominator != 0 else 0.0


@dataclass(frozen=True)
class TermTotals(Totals):
    """One term over the global batch."""

    planned: float
    """Denominator that the batches promised."""


class TokenCounts(NamedTuple):
    """Positions of a batch, counted on the host by the ranks that read it."""

    padding: int = 0
    """Number of positions without text."""
    loss: int = 0
    """Number of positions that the main term counts."""
    pairs: int = 0
    """Number of pairs of positions, (query, key), that attend to each other in layers without a window."""
    window_pairs: int = 0
    """Number of such pairs in layers with a window."""
    outputs: int = 0
    """Number of positions whose logits some term counts."""


NO_TOKENS = TokenCounts()
"""Counts of a rank that reads nothing, or where none are needed."""


@dataclass
class StepSums:
    """Sums of a step on this rank; several passes through the schedule may add to them."""

    pairs: PairAccumulator
    planned: dict[str, float]
    """Denominator of each term over this rank's batches, in the order of `pairs.terms`."""
    tokens: TokenCounts = NO_TOKENS
    """Counts of this rank's batches; 0 where it reads none."""
    num_positions: int = 0
    """Number of positions in all rows of the global batch: known without communication, as ranks have equal rows."""
    gradient_scale: float | Tensor = 1.0
    """Factor of the objectives before backward, with the loss scale of fp16; the division takes it out."""

    def add_batches(self, planned: Mapping[str, float], tokens: TokenCounts) -> None:
        """Adds what the batches of one pass promise."""
        for term, denominator in planned.items():
            self.planned[term] += denominator
        self.tokens = TokenCounts(*(own + more for own, more in zip(self.tokens, tokens)))


@dataclass(frozen=True)
class StepTotals:
    """Totals of a global batch, the same on all ranks: its terms, gradient norm, counts, requests to stop."""

    terms: Mapping[str, TermTotals]
    stop_requested: bool
    """Whether any rank asked to stop."""
    tokens: TokenCounts
    num_positions: int
    """Number of positions of the global batch, with and without text."""
    grad_norm_sq: float | None
    """Squared norm of the gradient before the division by the denominator; not finite where fp16 overflowed. None where
    there is no gradient."""
    coefficients: Mapping[str, float]
    sources: tuple[Totals, ...] = ()
    """Main term by source of the blend; empty if there is only one, or if the loss function gives none by source."""
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    """Means and maxima that loss functions report, and statistics of a preference loss on its groups, by name; without
    those that nothing counted for."""

    @property
    def loss(self) -> float:
        """Returns the main term's mean, in nats."""
        return self.terms[MAIN_TERM].mean

    @property
    def objective(self) -> float:
        """Returns the sum over terms of coefficient x numerator / denominator: exactly what was differentiated."""
        return math.fsum(coefficient * self.terms[term].mean for term, coefficient in self.coefficients.items())

    @property
    def grad_norm(self) -> float | None:
        """Returns the global L2 norm of the normalized gradient, before clipping; None where there is no gradient."""
        divisor = self.terms[MAIN_TERM].denominator or math.inf  # an empty batch has no gradient
        return None if self.grad_norm_sq is None else math.sqrt(self.grad_norm_sq) / divisor

    @property
    def num_text_tokens(self) -> int:
        """Returns the number of positions with text."""
        return self.num_positions - self.tokens.padding

    @property
    def is_empty(self) -> bool:
        """Says whether there is nothing to learn: the main denominator is 0."""
        return self.terms[MAIN_TERM].denominator == 0


class GlobalTotals:
    """The sums of every rank while one collective over the world adds them, which the gradient norm needs anyway.

    `read` waits for it and returns the totals. Loss pairs count where they are owned (`PairAccumulator.owned`), planned
    denominators and tokens on the first pipeline stage, once for each replica of the data (`Groups.counts_planned`);
    all other ranks add zeros. So the same collective sums over DP x CP and spreads the result over TP and PP, and every
    rank sees the same bits.
    """

    def __init__(
        self, sums: StepSums, groups: Groups, stop_requested: bool = False, local_grad_norm_sq: Tensor | None = None
    ) -> None:
        """Starts the collective; a stop request of any rank becomes one of all, and parts of a squared norm are added
        up."""
        self._terms, self._num_positions = sums.pairs.terms, sums.num_positions
        self._diagnostics, self._world_size = sums.pairs.diagnostics, groups.layout.world_size
        assert len(sums.planned) == len(self._terms), "a term has no planned denominator"
        # of the host: the stop request is sent along, since a collective of its own would cost a latency in every step
        host = (
            [*sums.planned.values(), *sums.tokens]
            if groups.counts_planned
            else [0.0] * (len(self._terms) + len(NO_TOKENS))
        )
        numbers = to_device(torch.tensor([*host, float(stop_requested)], dtype=torch.float64), groups.device)
        parts = {
            "pairs": sums.pairs.owned(groups).view(-1),
            "planned": numbers[: len(self._terms)],
            "tokens": numbers[len(self._terms) : -1],
            "stop_requested": numbers[-1:],
            "sources": sums.pairs.owned_by_source(groups).view(-1),
            "diagnostics": self._diagnostics.vector(groups),
            "norm_sq": numbers[:0] if local_grad_norm_sq is None else local_grad_norm_sq.double().view(1),
        }
        self._sizes = {name: len(part) for name, part in parts.items()}
        self._sum = AsyncAllReduce(torch.cat([*parts.values()]))  # over the world; the host goes on

    def main_denominator(self) -> Tensor:
        """Returns the first term's measured denominator: float64 scalar on the device."""
        return self._sum.get()[1]  # pairs come first: numerator and denominator of each term in turn

    def read(self, coefficients: Mapping[str, float]) -> StepTotals:
        """Reads all totals on the host. One device synchronization."""
        total = self._sum.get()
        with patience.for_device(total.device):
            values: list[float] = total.tolist()  # here the host waits for the step's kernels
        parts: dict[str, list[float]] = {}
        for name, size in self._sizes.items():
            parts[name], values = values[:size], values[size:]
        of_terms = zip(parts["pairs"][::2], parts["pairs"][1::2], parts["planned"], strict=True)
        sources, half = parts["sources"], len(parts["sources"]) // 2
        return StepTotals(
            terms={term: TermTotals(*sums) for term, sums in zip(self._terms, of_terms, strict=True)},
            stop_requested=parts["stop_requested"][0] > 0,
            tokens=TokenCounts(*map(int, parts["tokens"])),  # exact: float64 holds whole numbers to 2^53
            num_positions=self._num_positions,
            grad_norm_sq=parts["norm_sq"][0] if parts["norm_sq"] else None,
            coefficients=coefficients,
            sources=tuple(map(Totals, sources[:half], sources[half:])) if all(map(math.isfinite, sources)) else (),
            diagnostics=self._diagnostics.read(parts["diagnostics"], self._world_size),
        )


def sum_planned(planned: Sequence[float], groups: Groups, everywhere: bool) -> AsyncAllReduce:
    """Starts to sum every term's denominator over the global batch, as the batches promise it before the forward pass.

    Costs one collective, of [terms] float64. Each row is counted by one rank that reads it; all other ranks add zeros.
    The sum is over the world, with the same bits on all ranks, or within each stage, whose ranks read the whole batch.
    """
    # ranks of TP and CP share rows, and every stage reads them: one of all these counts
    owns = groups.counts_planned if everywhere else groups.tp_rank == groups.cp_rank == 0
    own = torch.tensor(planned if owns else [0.0] * len(planned), dtype=torch.float64)
    return AsyncAllReduce(to_device(own, groups.device), None if everywhere else groups.stage)
