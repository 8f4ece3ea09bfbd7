"""Process groups are where the layout's arithmetic says."""

from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from mtrain.layout import Layout
from mtrain.mcore.groups import Groups
from tests.pool import Pool

LAYOUTS = [
    Layout(),
    Layout(tp=2, cp=2, dp=2),
    Layout(tp=2, pp=2, dp=2),
    Layout(cp=2, pp=2, dp=2),
    Layout(pp=4, dp=2, vpp=2),
    Layout(tp=4, pp=2),
]


class Seen(NamedTuple):
    """What a rank finds."""

    rank: int
    coordinate: tuple[int, int, int, int]
    members: dict[str, list[int]]
    owns_loss: bool
    owns_plan: bool


def look_around(groups: Groups) -> Seen:
    """This rank's place and neighbours."""
    members = {
        name: dist.get_process_group_ranks(group)
        for name, group in {"tp": groups.tp, "cp": groups.cp, "dp_cp": groups.dp_cp}.items()
    }
    place = (groups.tp_rank, groups.cp_rank, groups.dp_rank, groups.pp_rank)
    return Seen(groups.rank, place, members, groups.owns_loss, groups.owns_plan)


def neighbours(layout: Layout, rank: int, axes: set[str]) -> list[int]:
    """Ranks whose coordinates differ from this rank's on the given axes alone."""
    own: Any = layout.coordinate(rank)._asdict()
    return [
        other
        for other in range(layout.world_size)
        if all(value == own[axis] for axis, value in layout.coordinate(other)._asdict().items() if axis not in axes)
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_are_those_of_the_layout(pool: Pool, layout: Layout) -> None:
    for rank, seen in enumerate(pool.run(look_around, layout)):
        assert seen.rank == rank
        assert seen.coordinate == tuple(layout.coordinate(rank))
        assert seen.members == {
            "tp": neighbours(layout, rank, {"tp"}),
            "cp": neighbours(layout, rank, {"cp"}),
            "dp_cp": neighbours(layout, rank, {"dp", "cp"}),
        }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_and_plans_have_one_owner_for_each_part_of_the_batch(pool: Pool, layout: Layout) -> None:
    seen = pool.run(look_around, layout)
    owners = sorted((s.coordinate[1], s.coordinate[2]) for s in seen if s.owns_loss)
    assert owners == sorted((cp, dp) for cp in range(layout.cp) for dp in range(layout.dp))
    assert all(s.coordinate[3] == layout.pp - 1 for s in seen if s.owns_loss)
    assert sorted(s.coordinate[2] for s in seen if s.owns_plan) == list(range(layout.dp))
