"""The states of every rank's random number generators, as tensors of a checkpoint. Only dropout draws from them."""

from collections.abc import Mapping

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from mtrain.core.ranks.groups import Groups

PREFIX = "rng."
"""Prefix of their keys; no part of the model begins with it."""


def random_states(groups: Groups) -> dict[str, Tensor]:
    """Returns copies of this rank's generator states by name, uint8 on the CPU: torch's own and megatron-core's."""
    states = {"cpu": torch.get_rng_state()}
    if groups.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    # megatron-core swaps one of the tracker's states in inside `fork()` and back out afterwards
    states |= {f"tracker.{name}": state for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()}
    # cloned, since a save writes them in a thread while training continues
    return {name: state.cpu().clone() for name, state in states.items()}


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Continues from `random_states` of the same rank of the same layout and kind of device."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    tracker = "tracker."
    tensor_parallel.get_cuda_rng_tracker().set_states(
        {name.removeprefix(tracker): state for name, state in states.items() if name.startswith(tracker)}
    )


def sharded(states: Mapping[str, Tensor], groups: Groups) -> list[ShardedTensor]:
    """Returns each state as this rank's row of a global tensor [world_size, length]."""
    world_size = groups.layout.world_size
    return [
        # replica_id 0 everywhere: no two ranks count as copies
        ShardedTensor.from_rank_offsets(
            f"{PREFIX}{name}", state, (0, groups.rank, world_size), replica_id=0, prepend_axis_num=1
        )
        for name, state in states.items()
    ]
