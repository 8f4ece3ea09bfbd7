"""The rank side of test_all_reduce.py."""

import torch

from mtrain.core.ranks.all_reduce import AsyncAllReduce
from mtrain.core.ranks.groups import Groups


def sums(groups: Groups, vectors: list[list[float]]) -> tuple[list[float], list[float], int]:
    """Returns this rank's vector summed over the world and over its pipeline stage, and the stage."""
    own = torch.tensor(vectors[groups.rank], dtype=torch.float64)
    both = AsyncAllReduce(own.clone()), AsyncAllReduce(own.clone(), groups.stage)
    world, stage = (each.get() for each in both)
    return world.tolist(), stage.tolist(), groups.pp_rank
