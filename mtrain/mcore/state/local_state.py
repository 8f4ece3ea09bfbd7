"""All of the training state that a rank holds, under the names of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.checkpoint.format.writer import Shard
from mtrain.mcore.engine import optimizer_state
from mtrain.mcore.engine.rank_model import RankModel
from mtrain.mcore.model.build import unwrap
from mtrain.mcore.model.layer_spec import global_name
from mtrain.mcore.model.sharded_parameters import ShardedParameter, optimizer_key, run_of, sharded_parameters, shards

WEIGHTS = "weights"
"""Kind of the weights as they compute; the optimizer's states have the names of `optimizer_state.STATES`."""


class Held(NamedTuple):
    """A shard of one tensor of the state."""

    kind: str
    """Kind of the tensor: WEIGHTS, or one of `optimizer_state.STATES`."""
    name: str
    """Global name of the parameter."""
    num_stacked: int
    """Number of leading axes of the shard that number layers and experts."""
    shard: Shard
    """Key in a checkpoint, place and values: a view."""


@torch.no_grad()
def local_state(model: RankModel) -> Iterator[Held]:
    """Yields all of the state, replicas too, in the order of the model.

    Args:
        model: Model with its parameters complete; one that was never updated gets zero moments.
    """
    modules = [unwrap(chunk) for chunk in model.chunks]
    places = {place.data: place for place in sharded_parameters(modules, model.groups)}
    for place in places.values():
        # views, not copies: parameters are contiguous
        yield from _held(WEIGHTS, place, place.key, place.data.flatten(), (0, place.data.numel()))
    for flat_slice, states in optimizer_state.flat_slice_states(model.optimizer.inner):
        # the optimizer knows parameters as objects; the name comes from their place in the model
        place = places[flat_slice.parameter]
        for kind, values in states.items():
            yield from _held(kind, place, optimizer_key(kind, place.key), values.flatten(), flat_slice[2:4])


def _held(kind: str, place: ShardedParameter, key: str, values: Tensor, run: tuple[int, int]) -> Iterator[Held]:
    first = next(shards(place, place.key, place.data))
    axes = first.prepend_axis_num
    for shard in run_of(place, key, values, *run):
        yield Held(kind, global_name(place.key, shard.at.offset[:axes]), axes, shard)
