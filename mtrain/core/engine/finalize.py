"""The one division.

After the last backward, megatron-core sums gradients over DP x CP (and over TP for replicated parameters, and between
tied embeddings). The one collective (`GlobalTotals` in loss_reduction.py) sums the loss pairs over all ranks, and with
them the squared norms of the reduced gradients. This module starts both and multiplies the gradients once by 1 / D of
the main term, and by the inverse of the scales of fp16. No clamp, no epsilon: D = 0 gives gradients of exactly 0.

Numerators of other terms than the main one are multiplied by a factor before backward, with which that division is
right for all of them.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mtrain.core.engine.loss_reduction import GlobalTotals, StepSums, sum_planned
from mtrain.core.engine.sharded_model import ShardedModel
from mtrain.core.loss.objective import Objective, power_of_two_near, side_term_factors
from mtrain.core.ranks.groups import Groups


class NumeratorFactors:
    """Factors of the numerators, from the planned denominators of the whole global batch.

    In fp32 and bf16 nothing is communicated where all terms have one denominator: their coefficients are the factors.
    """

    def __init__(self, planned: Sequence[float], objective: Objective, is_fp16: bool, groups: Groups) -> None:
        """Takes the denominator of each term over this rank's batch.

        In fp16 gradients are kept near 1 by a numerator_scale, a power of two that all stages must agree on.
        """
        self._coefficients, self._router_terms = objective.coefficients, objective.router_terms
        # fp16 needs 1 / D in advance, else sums over a batch overflow; terms with other denominators need the ratios
        is_needed = is_fp16 or bool(objective.apart)
        # Over the world in fp16: all stages multiply by one power of two. Else a stage has all it needs itself.
        self._totals = sum_planned(planned, groups, everywhere=is_fp16) if is_needed else None
        self._factors: Mapping[str, float | Tensor] | None = None
        self.numerator_scale: float | Tensor = 1.0
        """Factor that loss and division share: in fp16 a float64 scalar on the device, else 1. A power of two changes
        no mantissa, so the one division takes it out exactly."""
        if is_fp16:
            assert self._totals is not None
            # Read here, where no stage waits for another one: on CPUs all ranks take part in the later rounds of the
            # collective. On GPUs only the next work on the stream waits for it.
            self.numerator_scale = power_of_two_near(self._totals.get()[0].reciprocal())

    def of_terms(self) -> Mapping[str, float | Tensor]:
        """Returns one factor per side term; first called after the last stage's first forward pass, or by a router."""
        if self._totals is None:
            return self._coefficients
        if self._factors is None:
            # awaited late, so the collective runs during the first forward pass
            self._factors = side_term_factors(self._totals.get(), self._coefficients)
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
        sharded: This rank's model, after the last backward.
        stop_requested: Flag joined over all ranks on the way, for instance "a stop signal has arrived here".
        local_grad_norm_sq: `Optimizer.local_grad_norm_sq`, where the totals shall have the norm of the reduced
            gradients. It is the norm before they are divided by D.
    """
    # returns when all reductions are done: DP x CP (experts: their own replicas), TP for norms under sp, tied tables
    sharded.finish_grad_sync(groups)
    # After the reductions, before the division: the norm is linear in the factor, which the host applies to it later,
    # and one collective carries losses and norm together.
    norm_sq = None if local_grad_norm_sq is None else local_grad_norm_sq() / sums.gradient_scale**2
    totals = GlobalTotals(sums, groups, stop_requested, norm_sq)
    denominator = totals.main_denominator()  # stays on the device: the host has not waited yet
    # Rounded to float32 where it meets the gradients. If it overflows there, the host refuses the denominator before
    # anything is applied (mtrain/core/step/totals.py).
    factor = torch.where(denominator == 0, 0.0, 1.0 / (denominator * sums.gradient_scale))
    sharded.scale_gradients(factor)
    return totals
