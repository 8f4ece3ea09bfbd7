"""Adam's state of whole parameters, for comparisons."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.core.engine.optimizer_state import STATES
from mtrain.core.engine.rank_model import RankModel


@torch.no_grad()
def whole_states(model: RankModel) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Yields (parameter, name of the state, float32 tensor of the parameter's shape). Collective."""
    optimizer = model.optimizer
    held = {
        id(flat_slice.parameter): (flat_slice, states) for flat_slice, states in optimizer.state.flat_slice_states()
    }
    shards = optimizer.inner.chained_optimizers[0].config.use_distributed_optimizer
    for parameter in (each for chunk in model.chunks for each in chunk.parameters() if each.requires_grad):
        for name in STATES:
            whole = torch.zeros(parameter.shape)
            if id(parameter) in held:
                flat_slice, states = held[id(parameter)]
                whole.view(-1)[flat_slice.start : flat_slice.end] = states[name].flatten()
            if shards:
                dist.all_reduce(whole, group=model.groups.replicas_of(parameter))
            yield parameter, name, whole
