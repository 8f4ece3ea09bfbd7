"""What numerators are multiplied by before backward, so that one division by the main denominator is right for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mtrain.loss.objective import Objective, power_of_two_near, side_term_factors
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine.loss_reduction import PlannedTotals


class NumeratorFactors:
    """Follow from the planned denominators of the whole global batch.

    In fp32 and bf16 nothing is communicated where all terms have one denominator: their coefficients are the factors.
    """

    def __init__(self, planned: Sequence[float], objective: Objective, is_fp16: bool, groups: Groups) -> None:
        """Args:
        planned: The denominator of each term over this rank's batch.
        objective: The terms.
        is_fp16: Gradients are kept near 1 by a numerator_scale, an exact power of two that all stages must agree on.
        groups: The process groups.
        """
        self._coefficients, self._router_terms = objective.coefficients, objective.router_terms
        # fp16 needs 1 / D in advance, else sums over a batch overflow; terms with other denominators need the ratios.
        is_needed = is_fp16 or bool(objective.apart)
        # Over the world in fp16: all stages multiply by one power of two. Else a stage has all it needs itself.
        self._totals = PlannedTotals(planned, groups, everywhere=is_fp16) if is_needed else None
        self._factors: Mapping[str, float | Tensor] | None = None
        self.numerator_scale: float | Tensor = 1.0
        """What loss and division share: in fp16 a float64 scalar on the device, else 1. A power of two changes no
        mantissa, so the one division takes it out exactly."""
        if is_fp16:
            assert self._totals is not None
            # Asked for here, where no stage waits for another one: on CPUs all ranks take part in the later rounds of
            # the collective. On GPUs nothing waits for it but what comes next on the stream.
            self.numerator_scale = power_of_two_near(self._totals.on_device()[0].reciprocal())

    def of_terms(self) -> Mapping[str, float | Tensor]:
        """One a side term; first called after the first forward pass of the last stage, or by the first router."""
        if self._totals is None:
            return self._coefficients
        if self._factors is None:
            # Awaited late, so the collective runs beside the first forward pass.
            self._factors = side_term_factors(self._totals.on_device(), self._coefficients)
        return self._factors

    def of_routers(self) -> Tensor:
        """[router_terms] float64 on the device, the numerator_scale in them; first called in the first forward pass."""
        factors = self.of_terms()
        return torch.stack([torch.as_tensor(factors[term]) for term in self._router_terms]) * self.numerator_scale

    def wait(self) -> None:
        """Ends the collective on ranks that have asked for no factor."""
        # On CPUs the later rounds of AsyncAllReduce start only when its sum is read: a rank that never asked would
        # leave its partners waiting.
        if self._totals is not None:
            self._totals.on_device()
