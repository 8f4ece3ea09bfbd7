"""Process groups match the layout's arithmetic."""

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

import mtrain.core.ranks.groups as groups_module
from mtrain.arch.layout import Layout
from mtrain.core.ranks.groups import Groups, opened_groups
from tests.pool import Pool

LAYOUTS = [  # by day every two axes together
    Layout(tp=2, cp=2, dp=2),
    Layout(cp=2, pp=2, dp=2),
    *(
        pytest.param(each, marks=pytest.mark.nightly)
        for each in (Layout(), Layout(tp=2, pp=2, dp=2), Layout(pp=4, dp=2, vpp=2), Layout(tp=4, pp=2))
    ),
]


class Seen(NamedTuple):
    """What a rank knows of its place."""

    rank: int
    coordinate: tuple[int, int, int, int]
    members: dict[str, list[int]]
    counts_loss: bool
    counts_planned: bool


def look_around(groups: Groups) -> Seen:
    """Returns this rank's place and neighbours."""
    members = {
        name: dist.get_process_group_ranks(group)
        for name, group in {"tp": groups.tp, "cp": groups.cp, "dp_cp": groups.dp_cp}.items()
    }
    place = (groups.tp_rank, groups.cp_rank, groups.dp_rank, groups.pp_rank)
    return Seen(groups.rank, place, members, groups.counts_loss, groups.counts_planned)


def connections_at_once(groups: Groups) -> tuple[list[bool], bool]:
    """Says of every group that a layout opens on a world bound to a GPU whether it would be connected at once, and
    whether the world is bound afterwards."""
    world, at_once = dist.group.WORLD, list[bool]()
    assert world is not None
    new_group, place = dist.new_group, torch.device("cuda", 0)

    def noted(*given: Any, **options: Any) -> Any:
        at_once.append(world.bound_device_id is not None)
        world.bound_device_id = None  # there is no NCCL here
        return new_group(*given, **options)

    parallel_state.destroy_model_parallel()
    world.bound_device_id = place
    with (
        mock.patch.object(dist, "new_group", noted),
        # `meta` stands for a GPU, for which hosts have a group of their own
        mock.patch.object(groups_module, "seed_generators"),
        opened_groups(groups.layout, torch.device("meta"), 1, 60) as again,
    ):
        assert again.tp_host is not again.tp
        bound, world.bound_device_id = world.bound_device_id, None
    return at_once, bound == place


def neighbours(layout: Layout, rank: int, axes: set[str]) -> list[int]:
    """Returns the ranks whose coordinates differ from this rank's on the given axes alone."""
    own: Any = layout.coordinate(rank)._asdict()
    return [
        other
        for other in range(layout.world_size)
        if all(value == own[axis] for axis, value in layout.coordinate(other)._asdict().items() if axis not in axes)
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_are_those_of_the_layout(pool: Pool, layout: Layout) -> None:
    """Losses and plans also have one owner for each part of the batch."""
    everyone = pool.run(look_around, layout)
    for rank, seen in enumerate(everyone):
        assert seen.rank == rank
        assert seen.coordinate == tuple(layout.coordinate(rank))
        assert seen.members == {
            "tp": neighbours(layout, rank, {"tp"}),
            "cp": neighbours(layout, rank, {"cp"}),
            "dp_cp": neighbours(layout, rank, {"dp", "cp"}),
        }
    owners = sorted((s.coordinate[1], s.coordinate[2]) for s in everyone if s.counts_loss)
    assert owners == sorted((cp, dp) for cp in range(layout.cp) for dp in range(layout.dp))
    assert all(s.coordinate[3] == layout.pp - 1 for s in everyone if s.counts_loss)
    assert sorted(s.coordinate[2] for s in everyone if s.counts_planned) == list(range(layout.dp))


def draw(groups: Groups) -> tuple[tuple[int, int, int], float, float]:
    """Returns this rank's place without tp, and random numbers as dropout draws for replicated and sharded tensors."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    place, replicated = (groups.pp_rank, groups.cp_rank, groups.dp_rank), float(torch.rand(()))
    with get_cuda_rng_tracker().fork():
        return place, replicated, float(torch.rand(()))


@pytest.mark.parametrize("layout", [Layout(tp=2, cp=2, dp=2), Layout(tp=2, pp=2, dp=2)], ids=str)
def test_dropout_draws_differ_between_places_and_agree_where_activations_do(pool: Pool, layout: Layout) -> None:
    draws = pool.run(draw, layout)
    by_place = {place: {number for other, number, _ in draws if other == place} for place, _, _ in draws}
    assert all(len(found) == 1 for found in by_place.values())
    assert len({number for _, number, _ in draws}) == len(by_place) == 4
    assert len({number for _, _, number in draws}) == 8


def test_groups_on_gpus_are_connected_when_they_are_used(pool: Pool) -> None:
    for at_once, is_bound in pool.run(connections_at_once, Layout(tp=2, dp=2)):
        assert len(at_once) > 10, "megatron-core's, and those of hosts"
        assert not any(at_once)
        assert is_bound
