"""Random number generator states of all ranks, as tensors in a checkpoint. Only dropout draws from them."""

from collections.abc import Mapping

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from mtrain.core.ranks.groups import Groups

PREFIX = "rng."
"""Prefix of their keys; no key of a model begins with it."""


def random_states(groups: Groups) -> dict[str, Tensor]:
    """Returns copies of torch's and megatron-core's generator states on this rank by name, uint8 on the CPU."""
    states = {"cpu": torch.get_rng_state()}
    if groups.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    # megatron-core swaps one of the tracker's states in during `fork()`
    states |= {f"tracker.{name}": state for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()}
    # cloned, since a thread saves them while training continues
    return {name: state.cpu().clone() for name, state in states.items()}


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Sets the states that `random_states` returned for the same rank, layout and kind of device."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    tracker = "tracker."
    tensor_parallel.get_cuda_rng_tracker().set_states(
        {name.removeprefix(tracker): state for name, state in states.items() if name.startswith(tracker)}
    )


def sharded(states: Mapping[str, Tensor], groups: Groups) -> list[ShardedTensor]:
    """Returns each state as one row, this rank's, of a global tensor [world_size, length]."""
    world_size = groups.layout.world_size
    return [
        # replica_id 0 on all ranks, since no two of them hold copies
        ShardedTensor.from_rank_offsets(
            f"{PREFIX}{name}", state, (0, groups.rank, world_size), replica_id=0, prepend_axis_num=1
        )
        for name, state in states.items()
    ]
