"""Factors of numerators before backward, with which one division by the main denominator is right for all terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mtrain.loss.objective import Objective, power_of_two_near, side_term_factors
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine.loss_reduction import PlannedTotals


class NumeratorFactors:
    """Factors of the numerators, from the planned denominators of the whole global batch.

    In fp32 and bf16 nothing is communicated where all terms have one denominator: their coefficients are the factors.
    """

    def __init__(self, planned: Sequence[float], objective: Objective, is_fp16: bool, groups: Groups) -> None:
        """
        Args:
            planned: Denominator of each term over this rank's batch.
            objective: Terms of the objective.
            is_fp16: Whether gradients are kept near 1 by a numerator_scale, a power of two that all stages must agree
                on.
            groups: The process groups.
        """
        self._coefficients, self._router_terms = objective.coefficients, objective.router_terms
        # fp16 needs 1 / D in advance, else sums over a batch overflow; terms with other denominators need the ratios
        is_needed = is_fp16 or bool(objective.apart)
        # Over the world in fp16: all stages multiply by one power of two. Else a stage has all it needs itself.
        self._totals = PlannedTotals(planned, groups, everywhere=is_fp16) if is_needed else None
        self._factors: Mapping[str, float | Tensor] | None = None
        self.numerator_scale: float | Tensor = 1.0
        """Factor that loss and division share: in fp16 a float64 scalar on the device, else 1. A power of two changes
        no mantissa, so the one division takes it out exactly."""
        if is_fp16:
            assert self._totals is not None
            # Read here, where no stage waits for another one: on CPUs all ranks take part in the later rounds of the
            # collective. On GPUs only the next work on the stream waits for it.
            self.numerator_scale = power_of_two_near(self._totals.on_device()[0].reciprocal())

    def of_terms(self) -> Mapping[str, float | Tensor]:
        """Returns one factor per side term; first called after the last stage's first forward pass, or by a router."""
        if self._totals is None:
            return self._coefficients
        if self._factors is None:
            # awaited late, so the collective runs during the first forward pass
            self._factors = side_term_factors(self._totals.on_device(), self._coefficients)
        return self._factors

    def of_routers(self) -> Tensor:
        """Returns [router_terms] float64 on the device, with the numerator_scale; first called in a forward pass."""
        factors = self.of_terms()
        return torch.stack([torch.as_tensor(factors[term]) for term in self._router_terms]) * self.numerator_scale

    def wait(self) -> None:
        """Ends the collective on ranks that have asked for no factor."""
        # On CPUs the later rounds of AsyncAllReduce start only when its sum is read: a rank that never asked would
        # leave its partners waiting.
        if self._totals is not None:
            self._totals.on_device()
