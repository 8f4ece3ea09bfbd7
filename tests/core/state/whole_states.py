"""Adam's state of whole parameters, for comparisons."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.core.engine.optimizer_state import STATES
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.sharded_parameters import sharded_parameters


@torch.no_grad()
def whole_states(model: RankModel) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Yields (parameter, name of the state, float32 tensor of the parameter's shape). Collective."""
    optimizer = model.optimizer
    held = {
        id(flat_slice.parameter): (flat_slice, states) for flat_slice, states in optimizer.state.flat_slice_states()
    }
    places = sharded_parameters(map(unwrap, model.chunks), model.groups)
    for parameter in (place.data for place in places if place.data.requires_grad):
        for name in STATES:
            whole = torch.zeros(parameter.shape)
            if id(parameter) in held:
                flat_slice, states = held[id(parameter)]
                whole.view(-1)[flat_slice.start : flat_slice.end] = states[name].flatten()
            if model.sharded.is_divided:
                dist.all_reduce(whole, group=model.groups.replicas_of(parameter))
            yield parameter, name, whole
