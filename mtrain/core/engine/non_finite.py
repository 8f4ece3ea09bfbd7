"""Finds the rank where a nan or inf originates: in its weights, its optimizer state, or its local gradient.

Losses and reduced gradients are sums, so one such number on one rank is on every rank a moment later. The check
therefore reads what each rank holds alone: its state when a step has failed, and the gradients of its own backward
pass, of which each step keeps one number per parameter before the ranks add them.
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
    """The source of numbers that are not finite."""

    text: str
    """Names of rank and tensor; empty if no rank has such a number."""
    is_state: bool
    """Whether weights or optimizer state are damaged, so that no other batch would do better."""


class _Seen(NamedTuple):
    """Findings of one rank."""

    state: NonFinite | None
    gradient: NonFinite | None


@torch.no_grad()
def largest_local_gradients(sharded: ShardedModel) -> Tensor | None:
    """Returns the largest absolute value of each parameter's gradient on the device, before ranks add theirs, or None.

    Call it after the last backward pass. Costs one pass over the gradients; the host does not wait.
    """
    gradients = [gradient for _, gradient in _gradients(sharded)]
    if not gradients:
        return None
    if gradients[0].device.type == "cpu":  # three times as fast as norms there; both keep nan
        least, most = zip(*(torch.aminmax(gradient) for gradient in gradients))
        return torch.maximum(torch.stack(most), -torch.stack(least))
    return torch.stack(torch._foreach_norm(gradients, float("inf")))


def cause_of_non_finite(model: RankModel, local_gradients: Tensor | None) -> Cause:
    """Names the rank and its first tensor, the same on all ranks. One all-gather of short objects over the world.

    The model's parameters are complete; `local_gradients` are those of `largest_local_gradients` in the step that
    failed.
    """
    parts = [held.shard for held in local_state(model)]
    own = _Seen(non_finite(parts), _in_gradients(model, local_gradients))
    everyone: list[_Seen] = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    # weights first: a nan in one makes every later gradient nan, also on ranks whose own state is fine
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
    places = {id(place.data): place for place in sharded_parameters(map(unwrap, model.chunks), model.groups)}
    place = places[id(bad[0])]
    first = next(shards(place, place.key, place.data))
    name = global_name(place.key, tuple(first.global_offset[: first.prepend_axis_num]))
    return NonFinite(f"{name} is not finite", len(bad))
