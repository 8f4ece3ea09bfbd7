"""The training state of a rank, and the shards that the rank writes, as views.

Replicas of weights share the writing. With a distributed optimizer each rank has a range of elements of each parameter;
a range is a few slices of the global tensor, so nothing has to be gathered.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from mtrain.base.fault_points import wanted_fault
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.layer_spec import global_name
from mtrain.core.layers.sharded_parameters import (
    ShardedParameter,
    checkpoint_parameters,
    has_own_shard,
    held_of,
    is_written_here,
    optimizer_key,
    run_of,
    sharded_parameters,
    shards,
    whole_of,
)
from mtrain.core.ranks import rng
from mtrain.core.state.finite import NonFinite, described, non_finite
from mtrain.core.state.shard import Shard

WEIGHTS = "weights"
"""Kind of the model weights; the kinds of optimizer states are the names in `optimizer_state.STATES`."""


class Held(NamedTuple):
    """A shard of one tensor of the state."""

    kind: str
    """Kind of the tensor: WEIGHTS, or one of `optimizer_state.STATES`."""
    name: str
    """Global name of the parameter."""
    num_stacked: int
    """Number of leading axes of the shard that stack layers and experts."""
    shard: Shard
    """Key in a checkpoint, slice of the global tensor, and values as a view."""


@torch.no_grad()
def local_state(model: RankModel) -> Iterator[Held]:
    """Yields the whole state of this rank, including replicas, in the order of the model.

    Parameters must be complete. A model that was never updated gets zero moments.
    """
    modules = [unwrap(chunk) for chunk in model.chunks]
    places = {place.data: place for place in sharded_parameters(modules, model.groups)}
    for place in places.values():
        for shard in held_of(place):
            yield Held(WEIGHTS, *_named(place, shard), shard)
    for flat_slice, states in model.optimizer.state.flat_slice_states():
        # the optimizer knows parameters as objects; the name comes from their place in the model
        place = places[flat_slice.parameter]
        for kind, values in states.items():
            # views, not copies: parameters are contiguous
            for shard in run_of(place, optimizer_key(kind, place.key), values.flatten(), *flat_slice[2:4]):
                yield Held(kind, *_named(place, shard), shard)


def _named(place: ShardedParameter, shard: Shard) -> tuple[str, int]:
    """Returns the global name of the parameter that a shard belongs to, and the number of its stacked axes."""
    axes = next(shards(place, place.key, place.data)).prepend_axis_num
    return global_name(place.key, shard.at.offset[:axes]), axes


_SPOILED = {"nan": math.nan, "huge": 3e38}


@torch.no_grad()
def local_shards(model: RankModel) -> list[Shard]:
    """Returns the shards that this rank writes, as views of the state of `local_state`; no communication."""
    chunks, optimizer, groups = model.chunks, model.optimizer, model.groups
    places = {place.data: place for place in checkpoint_parameters([unwrap(chunk) for chunk in chunks], groups)}
    # weights that are whole on every rank of DP x CP: each writes every n-th one
    parts = [part for place in places.values() if is_written_here(place) for part in held_of(place)]
    for flat_slice, states in optimizer.state.flat_slice_states():
        place = places[flat_slice.parameter]
        # A distributed optimizer's parts are no copies, so every rank of DP x CP writes its own; one of the copies over
        # TP is written.
        is_mine = has_own_shard(place) if model.sharded.is_divided else is_written_here(place)
        if not is_mine:
            continue
        for name, values in states.items():
            key = optimizer_key(name, place.key)
            parts += run_of(place, key, values.view(-1), flat_slice.start, flat_slice.end)
    for sharded in rng.sharded(rng.random_states(groups), groups):  # by every rank: no two have the same generators
        parts += whole_of(sharded, sharded.key, sharded.data)
    return parts


def non_finite_state(model: RankModel) -> str | None:
    """Describes what in a checkpoint of this state would be nan or inf, the same on all ranks; None if all is finite.

    One all-gather of short objects.
    """
    found: list[NonFinite | None] = [None] * dist.get_world_size()
    # over all ranks, since each sees only its shards, and either all must stop or none
    dist.all_gather_object(found, non_finite(local_shards(model)))
    return described(found)


@torch.no_grad()
def spoil_point(model: RankModel, step: int) -> None:
    """Damages a number of the live state if a test asks for it, like broken memory (base/fault_points.py)."""
    fault = wanted_fault(model.groups.rank, step)
    if fault is None or fault.kind not in (*_SPOILED, "flip"):
        return
    key, index = fault.phase.split(":")
    # views of the live state, including replicas
    parts = (held.shard for held in local_state(model))
    values = next(part for part in parts if part.key == key).data.view(-1)
    if fault.kind == "flip":
        values.view(torch.uint8)[int(index) * values.element_size()] ^= 1  # the lowest bit
    else:
        values[int(index)] = _SPOILED[fault.kind]
