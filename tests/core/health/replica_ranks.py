"""What ranks do in the tests of replicas."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from mtrain.base.errors import NumericError
from mtrain.checkpoint.state.replicas import ReplicaCheck
from mtrain.config import Config
from mtrain.core.engine.training_state import local_state
from mtrain.core.ranks.groups import Groups
from tests.core.state.checkpoint_ranks import build


class Found(NamedTuple):
    """What the replica check finds when bits are flipped one after the other."""

    equal: list[str]
    """Messages of the check on the untouched state, before and after."""
    compared: list[str]
    """Keys of which another rank holds the same slice, counted by hand."""
    flipped: list[str]
    """Keys in which the check found a flipped bit."""


def flipped_one_by_one(groups: Groups, config: Config) -> Found:
    """Flips a bit in each tensor that rank 1 holds, one after the other."""
    built = build(groups, config)
    check = ReplicaCheck(groups)

    def said() -> list[str]:
        try:
            check.run(built.model)
        except NumericError as error:
            return [str(error)]
        return []

    equal = said()
    parts = [each.shard for each in local_state(built.model)]
    places: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(places, [f"{part.key} {part.at}" for part in parts])
    others = {place for rank, held in enumerate(places) if rank != 1 for place in held}
    compared, flipped = [], []
    for number, place in enumerate(places[1]):
        if place in others:
            compared.append(place)
        if groups.rank == 1:
            parts[number].data.view(-1).view(torch.uint8)[0] ^= 1
        if said():
            flipped.append(place)
        if groups.rank == 1:
            parts[number].data.view(-1).view(torch.uint8)[0] ^= 1  # back
    return Found(equal + said(), compared, flipped)
