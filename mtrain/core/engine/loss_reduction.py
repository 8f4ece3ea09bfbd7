"""Adds the loss pairs of a step over microbatches, then over all ranks."""

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
    """Diagnostics of one step on this rank; part of the vector of all sums, so they need no collective of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}

    def expect(self, reported: Reported) -> None:
        """Adds names that this step reports, the same on all ranks; all other diagnostics are ignored."""
        for name in reported.means:
            self._sums.setdefault(name, torch.zeros(2, dtype=torch.float64, device=self._device))
        for name in reported.maxima:
            self._sums.setdefault(name, torch.full((), -math.inf, dtype=torch.float64, device=self._device))

    def add(self, pairs: Mapping[str, LossPair]) -> None:
        """Adds the diagnostics of one microbatch."""
        for term, pair in pairs.items():
            for name, value in pair.diagnostics.items():
                key = shown_name(term, name)
                if key in self._sums:
                    self._sums[key] = joined(self._sums[key], value)

    def vector(self, groups: Groups) -> Tensor:
        """Returns a vector, [n] float64, to sum over all ranks.

        Since a sum cannot find a maximum, a maximum takes one element for each rank, which only that rank sets.
        """
        parts = [torch.zeros(0, dtype=torch.float64, device=self._device)]
        for sums in self._sums.values():
            if sums.ndim:
                parts.append(sums if groups.counts_loss else torch.zeros_like(sums))
                continue
            maxima = sums.new_zeros(groups.layout.world_size)
            maxima[groups.rank] = sums if groups.counts_loss else -math.inf
            parts.append(maxima)
        return torch.cat(parts)

    def read(self, summed: Sequence[float], world_size: int) -> dict[str, float]:
        """Reads values by name from the sum of the vectors; leaves out those over no tokens."""
        result: dict[str, float] = {}
        for name, sums in self._sums.items():
            count = 2 if sums.ndim else world_size
            values, summed = summed[:count], summed[count:]
            if sums.ndim and values[1] != 0:
                result[name] = values[0] / values[1]
            elif not sums.ndim and max(values) > -math.inf:
                result[name] = max(values)
        return result


class PairAccumulator:
    """Sums the pairs of all microbatches of a step on the device in float64; the host never waits."""

    def __init__(
        self, terms: Sequence[str], device: torch.device, router_terms: Sequence[str] = (), num_sources: int = 0
    ) -> None:
        """Makes sums of 0.

        Args:
            terms: Terms computed from logits.
            router_terms: Terms computed by routers.
            num_sources: Number of sources by which the main term is reported; 0: not reported by source.
        """
        self.terms = (*terms, *router_terms)
        self.diagnostics = DiagnosticSums(device)
        # float64, since a step may have more than 2^24 tokens, up to which float32 counts exactly
        self.sums = torch.zeros(len(self.terms), 2, dtype=torch.float64, device=device)
        """Numerators and denominators, [terms, 2]."""
        self.by_source = torch.zeros(2, num_sources, dtype=torch.float64, device=device)
        """Numerators, then denominators of the main term by source, [2, sources]; nan if a microbatch gives none."""
        # views, made once, so that a microbatch adds in place without indexing or allocating
        self._of_logits, self._of_routers = self.sums[: len(terms)], self.sums[len(terms) :]
        self._term_sums = list(zip(terms, *self._of_logits.unbind(1)))

    def add(self, pairs: Mapping[str, LossPair]) -> None:
        """Adds the pairs of one microbatch; keeps no reference to them."""
        tick()
        for term, numerator, denominator in self._term_sums:
            # added to a copy, since megatron-core later scales the loss in place (forward_step_calc_loss)
            numerator.add_(pairs[term].numerator.detach())
            denominator.add_(pairs[term].denominator)
        self.diagnostics.add(pairs)
        if self.by_source.numel():
            by_source = pairs[MAIN_TERM].by_source
            self.by_source.add_(math.nan if by_source is None else by_source)

    def add_router(self, numerators: Tensor, denominators: Tensor) -> None:
        """Adds the values of one router for one microbatch, [router_terms] each."""
        self._of_routers.add_(torch.stack((numerators.detach(), denominators), dim=1))

    def owned(self, groups: Groups) -> Tensor:
        """Returns sums, [terms, 2], that add up over all ranks to those of the global batch.

        Pairs from logits are the same on several ranks, and count on one of them; pairs of routers count on all ranks.
        """
        # zeros on other ranks, since the vector must have the same length on all ranks
        return self.sums if groups.counts_loss else torch.cat((torch.zeros_like(self._of_logits), self._of_routers))

    def owned_by_source(self, groups: Groups) -> Tensor:
        """Returns sums by source, [2, sources], that add up over all ranks to those of the global batch."""
        return self.by_source if groups.counts_loss else torch.zeros_like(self.by_source)


@dataclass(frozen=True)
class Totals:
    """Sums of one term over the global batch or a part of it."""

    numerator: float
    denominator: float

    @property
    def mean(self) -> float:
        """Returns numerator / denominator, in nats; 0 if the denominator is 0."""
        return self.numerator / self.denominator if self.denominator != 0 else 0.0


@dataclass(frozen=True)
class TermTotals(Totals):
    """Sums of one term over the global batch."""

    planned: float
    """Denominator planned from the batches before the forward pass."""


class TokenCounts(NamedTuple):
    """Numbers of positions in a batch, counted on the host by the ranks that read it."""

    padding: int = 0
    """Number of positions without text."""
    loss: int = 0
    """Number of positions that the main term counts."""
    pairs: int = 0
    """Number of pairs of a query and a key that it attends to in layers without a window."""
    window_pairs: int = 0
    """Number of such pairs in layers with a window."""
    outputs: int = 0
    """Number of positions with logits that some term counts."""
    patches: int = 0
    """Number of patches of images."""
    patch_pairs: int = 0
    """Number of pairs of patches that attend to each other in the vision tower: those of one frame of an image."""


NO_TOKENS = TokenCounts()
"""Counts for a rank that reads nothing, or if no counts are needed."""


@dataclass
class StepSums:
    """Sums of a step on this rank; several passes through the schedule may add to them."""

    pairs: PairAccumulator
    planned: dict[str, float]
    """Denominator of each term over this rank's batches, in the order of `pairs.terms`."""
    tokens: TokenCounts = NO_TOKENS
    """Counts of this rank's batches; 0 if it reads none."""
    num_positions: int = 0
    """Number of positions in all rows of the global batch; needs no communication, since ranks have equal rows."""
    gradient_scale: float | Tensor = 1.0
    """Factor of the objective before backward, including the fp16 loss scale; the division removes it."""

    def add_batches(self, planned: Mapping[str, float], tokens: TokenCounts) -> None:
        """Adds the planned denominators and the token counts of the batches of one pass."""
        for term, denominator in planned.items():
            self.planned[term] += denominator
        self.tokens = TokenCounts(*(count + more for count, more in zip(self.tokens, tokens)))


@dataclass(frozen=True)
class StepTotals:
    """Totals of a global batch, the same on all ranks: terms, gradient norm, counts, stop requests."""

    terms: Mapping[str, TermTotals]
    stop_requested: bool
    """Whether any rank was asked to stop."""
    tokens: TokenCounts
    num_positions: int
    """Number of positions in the global batch, with and without text."""
    grad_norm_sq: float | None
    """Squared norm of the gradient before its division by the denominator; not finite if fp16 overflowed. None without
    a backward pass."""
    coefficients: Mapping[str, float]
    sources: tuple[Totals, ...] = ()
    """Main term by source of the blend; empty if the blend has one source or the loss is not reported by source."""
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    """Means and maxima from loss functions, and statistics of a preference loss, by name; no means over nothing."""

    @property
    def loss(self) -> float:
        """Returns the mean of the main term, in nats."""
        return self.terms[MAIN_TERM].mean

    @property
    def objective(self) -> float:
        """Returns the sum over terms of coefficient x numerator / denominator, which was differentiated."""
        return math.fsum(coefficient * self.terms[term].mean for term, coefficient in self.coefficients.items())

    @property
    def grad_norm(self) -> float | None:
        """Returns the global L2 norm of the normalized gradient, before clipping; None without a backward pass."""
        divisor = self.terms[MAIN_TERM].denominator or math.inf  # an empty batch has no gradient
        return None if self.grad_norm_sq is None else math.sqrt(self.grad_norm_sq) / divisor

    @property
    def num_text_tokens(self) -> int:
        """Returns the number of positions with text."""
        return self.num_positions - self.tokens.padding

    @property
    def is_empty(self) -> bool:
        """Says whether the main denominator is 0, so that the batch has nothing to learn."""
        return self.terms[MAIN_TERM].denominator == 0


class GlobalTotals:
    """All sums of a step while one all-reduce over the world, which the gradient norm needs anyway, adds them.

    `read` waits for it and returns the totals. Loss pairs count on one of the ranks that share them
    (`PairAccumulator.owned`), planned denominators and tokens on one of the ranks that share a batch
    (`Groups.counts_planned`); all other ranks add zeros. So the same all-reduce sums over DP x CP and broadcasts over
    TP and PP, and every rank gets the same bits.
    """

    def __init__(
        self, sums: StepSums, groups: Groups, stop_requested: bool = False, local_grad_norm_sq: Tensor | None = None
    ) -> None:
        """Starts the all-reduce, which also sums the parts of the squared norm and combines stop requests."""
        self._terms, self._num_positions = sums.pairs.terms, sums.num_positions
        self._diagnostics, self._world_size = sums.pairs.diagnostics, groups.layout.world_size
        assert len(sums.planned) == len(self._terms), "a term has no planned denominator"
        # numbers from the host; includes the stop request, for which a separate collective would cost time in every
        # step
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
        self._sum = AsyncAllReduce(torch.cat([*parts.values()]))  # over the world; the host does not wait

    def main_denominator(self) -> Tensor:
        """Returns the measured denominator of the main term, a float64 scalar on the device."""
        return self._sum.get()[1]  # pairs come first, with the numerator and the denominator of each term in turn

    def read(self, coefficients: Mapping[str, float]) -> StepTotals:
        """Returns all totals on the host, which waits for the device once."""
        total = self._sum.get()
        with patience.for_device(total.device):
            values: list[float] = total.tolist()  # here the host waits for the kernels of the step
        parts: dict[str, list[float]] = {}
        for name, size in self._sizes.items():
            parts[name], values = values[:size], values[size:]
        of_terms = zip(parts["pairs"][::2], parts["pairs"][1::2], parts["planned"], strict=True)
        sources, half = parts["sources"], len(parts["sources"]) // 2
        return StepTotals(
            terms={term: TermTotals(*sums) for term, sums in zip(self._terms, of_terms, strict=True)},
            stop_requested=parts["stop_requested"][0] > 0,
            tokens=TokenCounts(*map(int, parts["tokens"])),  # exact up to 2^53 in float64
            num_positions=self._num_positions,
            grad_norm_sq=parts["norm_sq"][0] if parts["norm_sq"] else None,
            coefficients=coefficients,
            sources=tuple(map(Totals, sources[:half], sources[half:])) if all(map(math.isfinite, sources)) else (),
            diagnostics=self._diagnostics.read(parts["diagnostics"], self._world_size),
        )


def sum_planned(planned: Sequence[float], groups: Groups, everywhere: bool) -> AsyncAllReduce:
    """Starts to sum the planned denominators of all terms over the global batch. One all-reduce of [terms] float64.

    Each row counts on one of the ranks that read it; all other ranks add zeros. The sum is over the world
    (`everywhere`), with the same bits on all ranks, or within each stage, whose ranks read the whole batch.
    """
    # TP and CP ranks share rows, which every stage reads, so one of these ranks counts
    owns = groups.counts_planned if everywhere else groups.tp_rank == groups.cp_rank == 0
    denominators = torch.tensor(planned if owns else [0.0] * len(planned), dtype=torch.float64)
    return AsyncAllReduce(to_device(denominators, groups.device), None if everywhere else groups.stage)
