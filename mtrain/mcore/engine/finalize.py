"""The one division.

After the last backward, megatron-core sums gradients over DP x CP (and over TP for replicated parameters, and between
tied embeddings); this module sums the loss pairs over all ranks, and with them the squared norms of the reduced
gradients. It multiplies the gradients once by 1 / D of the main term. No clamp, no epsilon: D = 0 gives gradients of
exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine.loss_reduction import NO_TOKENS, GlobalTotals, PairAccumulator, TokenCounts


class Finalizer:
    """megatron-core's `finalize_model_grads_func` for one step."""

    def __init__(
        self,
        pairs: PairAccumulator,
        planned: Sequence[float],
        stop_requested: bool,
        numerator_scale: float,
        groups: Groups,
        local_grad_norm_sq: Callable[[], Tensor] | None = None,
        tokens: TokenCounts = NO_TOKENS,
    ) -> None:
        """Args:
        pairs: Filled by the schedule before it calls this.
        planned: The denominator of each term over this rank's batch.
        stop_requested: Joined over all ranks on the way, for instance "a stop signal has arrived here".
        numerator_scale: What the objective was multiplied by before backward; compensated here.
        groups: The process groups.
        local_grad_norm_sq: `Optimizer.local_grad_norm_sq`, where the norm of the reduced gradients is wanted in the
            totals. It is the norm before they are divided.
        tokens: Of this rank's batch.
        """
        self._pairs, self._planned, self._tokens = pairs, planned, tokens
        self._stop_requested, self._numerator_scale, self._groups = stop_requested, numerator_scale, groups
        self._local_grad_norm_sq = local_grad_norm_sq
        self.totals: GlobalTotals | None = None

    def __call__(
        self,
        model: list[DistributedDataParallel],
        num_tokens: Tensor | None = None,
        pg_collection: object = None,
        force_all_reduce: bool | None = False,
    ) -> None:
        """Reduces the gradients and divides them. `num_tokens` is megatron-core's int32 count and plays no role."""
        finalize_model_grads(
            model, None, pg_collection=self._groups.collection, force_all_reduce=bool(force_all_reduce)
        )
        norm_sq = None if self._local_grad_norm_sq is None else self._local_grad_norm_sq()
        self.totals = GlobalTotals(
            self._pairs, self._planned, self._stop_requested, self._groups, norm_sq, self._tokens
        )
        denominator = self.totals.main_denominator()
        # Rounded to float32 where it meets the gradients. Where it overflows there, the host refuses the denominator
        # before anything is applied (mtrain/loss/scaling.py).
        factor = torch.where(denominator == 0, 0.0, 1.0 / (denominator * self._numerator_scale))
        for chunk in model:
            chunk.scale_gradients(factor)
