"""Finds the rank where a nan or inf originates: in its weights, its optimizer state, or its local gradient.

Losses and reduced gradients are sums, so a nan on one rank soon is on every rank. The check therefore reads what is
local to a rank: its state after a failed step, and the gradients of its own backward pass, for which each step stores
one number per parameter before they are reduced.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.core.engine.rank_model import RankModel
from mtrain.core.engine.sharded_model import ShardedModel
from mtrain.core.engine.training_state import local_state
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.layer_spec import global_name
from mtrain.core.layers.sharded_parameters import sharded_parameters, shards
from mtrain.core.state.finite import NonFinite, described, non_finite


class Cause(NamedTuple):
    """The origin of non-finite numbers."""

    text: str
    """Rank and tensor; "" if no rank has such a number."""
    is_state: bool
    """Whether weights or optimizer state are damaged, so that another batch would not help."""


class _Seen(NamedTuple):
    """Findings of one rank."""

    state: NonFinite | None
    gradient: NonFinite | None


@torch.no_grad()
def largest_local_gradients(sharded: ShardedModel) -> Tensor | None:
    """Returns the largest absolute value of the unreduced gradient of each parameter, on the device; None if this rank
    has no gradients.

    Call it after the last backward pass. Makes one pass over the gradients; the host does not wait.
    """
    gradients = [gradient for _, gradient in _gradients(sharded)]
    if not gradients:
        return None
    if gradients[0].device.type == "cpu":  # three times as fast as norms there; both propagate nan
        least, most = zip(*(torch.aminmax(gradient) for gradient in gradients))
        return torch.maximum(torch.stack(most), -torch.stack(least))
    return torch.stack(torch._foreach_norm(gradients, float("inf")))


def cause_of_non_finite(model: RankModel, local_gradients: Tensor | None) -> Cause:
    """Returns the cause, the same on all ranks. One all-gather of short objects over the world.

    Parameters must be complete; `local_gradients` is the result of `largest_local_gradients` in the failed step.
    """
    parts = [state_shard.shard for state_shard in local_state(model)]
    findings = _Seen(non_finite(parts), _in_gradients(model, local_gradients))
    everyone: list[_Seen] = [findings] * dist.get_world_size()
    dist.all_gather_object(everyone, findings)
    # state first, since a nan in a weight makes later gradients nan even on ranks with a sound state
    state = described([rank.state for rank in everyone])
    if state is not None:
        return Cause(state, is_state=True)
    gradient = described([rank.gradient for rank in everyone])
    return Cause("" if gradient is None else f"the gradient of {gradient}, before ranks add theirs up", is_state=False)


def _gradients(sharded: ShardedModel) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields parameters that have elements, with their gradients."""
    return (pair for pair in sharded.local_gradients() if pair[0].numel())


def _in_gradients(model: RankModel, largest: Tensor | None) -> NonFinite | None:
    if largest is None:
        return None
    flags = largest.isfinite().tolist()
    pairs = zip(_gradients(model.sharded), flags, strict=True)
    bad = [parameter for (parameter, _), is_finite in pairs if not is_finite]
    if not bad:
        return None
    sharded = {
        id(first_bad.data): first_bad for first_bad in sharded_parameters(map(unwrap, model.chunks), model.groups)
    }
    first_bad = sharded[id(bad[0])]
    first = next(shards(first_bad, first_bad.key, first_bad.data))
    name = global_name(first_bad.key, tuple(first.global_offset[: first.prepend_axis_num]))
    return NonFinite(f"{name} is not finite", len(bad))
