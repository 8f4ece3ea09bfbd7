"""The one division.

After the last backward, megatron-core sums gradients over DP x CP (and over TP for replicated parameters, and between
tied embeddings); this module sums the loss pairs over all ranks, and with them the squared norms of the reduced
gradients. It multiplies the gradients once by 1 / D of the main term, and by the inverse of the scales of fp16. No
clamp, no epsilon: D = 0 gives gradients of exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine.loss_reduction import GlobalTotals, StepSums

Finalize = Callable[
    [Sequence[DistributedDataParallel], StepSums, Groups, bool, Callable[[], Tensor] | None], GlobalTotals
]
"""Type of `finalize_gradients`, which describes the arguments."""


def finalize_gradients(
    chunks: Sequence[DistributedDataParallel],
    sums: StepSums,
    groups: Groups,
    stop_requested: bool = False,
    local_grad_norm_sq: Callable[[], Tensor] | None = None,
) -> GlobalTotals:
    """Reduces the gradients of a step and divides them. Collective over the world.

    Args:
        chunks: This rank's model chunks, after the last backward.
        sums: Sums that the backward passes have filled.
        groups: The process groups.
        stop_requested: Flag joined over all ranks on the way, for instance "a stop signal has arrived here".
        local_grad_norm_sq: `Optimizer.local_grad_norm_sq`, where the totals shall have the norm of the reduced
            gradients. It is the norm before they are divided by D.
    """
    # None: no token count of megatron-core, hence neither its broadcast and all-reduce of it nor its division. Returns
    # when all reductions are done: DP x CP (experts: their own replicas), TP for norms under sp, tied tables.
    finalize_model_grads(list(chunks), None, pg_collection=groups.collection)
    # After the reductions, before the division: the norm is linear in the factor, which the host applies to it later,
    # and one collective carries losses and norm together.
    norm_sq = None if local_grad_norm_sq is None else local_grad_norm_sq() / sums.gradient_scale**2
    totals = GlobalTotals(sums, groups, stop_requested, norm_sq)
    denominator = totals.main_denominator()  # stays on the device: the host has not waited yet
    # Rounded to float32 where it meets the gradients. If it overflows there, the host refuses the denominator before
    # anything is applied (mtrain/training/totals.py).
    factor = torch.where(denominator == 0, 0.0, 1.0 / (denominator * sums.gradient_scale))
    # In place on the whole float32 buffers, those of experts too: one multiplication per buffer, padding included.
    for chunk in chunks:
        chunk.scale_gradients(factor)
    return totals
