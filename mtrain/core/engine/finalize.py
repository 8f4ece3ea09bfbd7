"""The one division of gradients.

After the last backward pass, megatron-core sums gradients over DP x CP (and over TP for replicated parameters, and
between tied embeddings). One more all-reduce (`GlobalTotals` in loss_reduction.py) sums the loss pairs over all ranks,
together with the squared norms of the reduced gradients. This module starts both, and multiplies the gradients once by
1 / D of the main term and by the inverse of the fp16 scales. No clamp, no epsilon: D = 0 gives gradients of exactly 0.

The numerators of side terms are multiplied by a factor before backward, so that this division is right for all terms.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mtrain.core.engine.loss_reduction import GlobalTotals, StepSums, sum_planned
from mtrain.core.engine.sharded_model import ShardedModel
from mtrain.core.loss.objective import Objective, power_of_two_near, side_term_factors
from mtrain.core.ranks.groups import Groups


class NumeratorFactors:
    """Factors of the numerators before backward, from the planned denominators of the global batch.

    If all terms have the same denominator, their coefficients are the factors, and fp32 and bf16 need no communication.
    """

    def __init__(self, planned: Sequence[float], objective: Objective, is_fp16: bool, groups: Groups) -> None:
        """Starts to sum `planned`, the denominator of each term over this rank's batch, if it is needed.

        In fp16 a numerator_scale, a power of two that is the same on all stages, keeps gradients near 1.
        """
        self._coefficients, self._router_terms = objective.coefficients, objective.router_terms
        # fp16 needs 1 / D in advance, since sums over a batch overflow; terms with other denominators need the ratios
        is_needed = is_fp16 or bool(objective.apart)
        # over the world in fp16, so that all stages get the same power of two; otherwise a stage needs only its ranks
        self._totals = sum_planned(planned, groups, everywhere=is_fp16) if is_needed else None
        self._factors: Mapping[str, float | Tensor] | None = None
        self.numerator_scale: float | Tensor = 1.0
        """Factor of the loss that the division removes: in fp16 a float64 scalar on the device, else 1. It is removed
        exactly, since a power of two changes no mantissa."""
        if is_fp16:
            assert self._totals is not None
            # Read here, where no stage waits for another, since on CPUs all ranks take part in the later rounds of the
            # all-reduce. On GPUs only later work of the stream waits for it.
            self.numerator_scale = power_of_two_near(self._totals.get()[0].reciprocal())

    def of_terms(self) -> Mapping[str, float | Tensor]:
        """Returns one factor per side term; first called after the first forward pass, or by a router."""
        if self._totals is None:
            return self._coefficients
        if self._factors is None:
            # awaited late, so that the all-reduce overlaps the first forward pass
            self._factors = side_term_factors(self._totals.get(), self._coefficients)
        return self._factors

    def of_routers(self) -> Tensor:
        """Returns the factors of router terms times the numerator_scale, [router_terms] float64 on the device."""
        factors = self.of_terms()
        return torch.stack([torch.as_tensor(factors[term]) for term in self._router_terms]) * self.numerator_scale

    def wait(self) -> None:
        """Completes the all-reduce on ranks that have read no factor."""
        # on CPUs the later rounds of AsyncAllReduce start only when its sum is read, so a rank that never read it would
        # keep its partners waiting
        if self._totals is not None:
            self._totals.get()


def finalize_gradients(
    sharded: ShardedModel,
    sums: StepSums,
    groups: Groups,
    stop_requested: bool = False,
    local_grad_norm_sq: Callable[[], Tensor] | None = None,
) -> GlobalTotals:
    """Reduces the gradients of a step and divides them. Collective over the world.

    Args:
        sharded: This rank's model, after the last backward pass.
        stop_requested: Whether this rank was asked to stop; the totals say whether any rank was.
        local_grad_norm_sq: `Optimizer.local_grad_norm_sq`, if the totals must have the norm of the reduced gradients,
            taken before their division by D.
    """
    # waits for all reductions: over DP x CP (experts: over their replicas), over TP for norms under sp, of tied tables
    sharded.finish_grad_sync(groups)
    # After the reductions but before the division, so that one all-reduce carries losses and norm; the norm is linear
    # in the factor, so the host can apply it later.
    norm_sq = None if local_grad_norm_sq is None else local_grad_norm_sq() / sums.gradient_scale**2
    totals = GlobalTotals(sums, groups, stop_requested, norm_sq)
    denominator = totals.main_denominator()  # stays on the device, so the host does not wait
    # Rounded to float32 when it multiplies the gradients. If it overflows, the host refuses the denominator before the
    # update (mtrain/core/step/totals.py).
    factor = torch.where(denominator == 0, 0.0, 1.0 / (denominator * sums.gradient_scale))
    sharded.scale_gradients(factor)
    return totals
