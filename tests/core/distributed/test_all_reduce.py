"""Short vectors summed over ranks: correct, and the same bits everywhere."""

import math
import random

import pytest

from mtrain.arch.layout import Layout
from tests.core.distributed.all_reduce_ranks import sums
from tests.pool import Pool


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp=3),
        Layout(pp=2, dp=2),
        # powers of two and other numbers of ranks are above
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in (Layout(dp=2), Layout(pp=2, dp=3), Layout(tp=2, pp=2, dp=2))
        ),
    ],
    ids=str,
)
def test_all_ranks_read_the_same_sum(pool: Pool, layout: Layout) -> None:
    source = random.Random(1)
    vectors = [[source.gauss(0, 1) for _ in range(5)] for _ in range(layout.world_size)]
    found = pool.run(sums, layout, vectors)
    assert len({tuple(world) for world, _, _ in found}) == 1
    assert found[0][0] == pytest.approx([math.fsum(column) for column in zip(*vectors)], rel=1e-13)
    for stage in range(layout.pp):
        own = {tuple(inside) for _, inside, place in found if place == stage}
        members = [vector for vector, (_, _, place) in zip(vectors, found, strict=True) if place == stage]
        assert len(own) == 1
        assert list(own.pop()) == pytest.approx([math.fsum(column) for column in zip(*members)], rel=1e-13)
