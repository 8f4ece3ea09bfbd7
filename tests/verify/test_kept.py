"""Kept ranks: the same ones answer again, and a failure arrives as from fresh ones and leaves nothing behind."""

import pytest

from mtrain.base.errors import NumericError
from mtrain.plan.layout import Layout
from tests.pool import RankFailed
from tests.verify.core.rank_functions import coordinates, drawn, fail, process
from tests.verify.kept import KeptPool

TWO = Layout(dp=2)


def test_the_same_ranks_answer_again_from_the_same_random_states(kept: KeptPool) -> None:
    assert kept.run(coordinates, TWO) == [(0, 0, 0, 0), (0, 0, 1, 0)]
    first = kept.run(process, TWO)
    assert kept.run(process, TWO) == first
    assert len(set(first)) == 2
    assert kept.run(drawn, TWO) == kept.run(drawn, TWO)
    assert kept.run(drawn, TWO) != kept.run(drawn, TWO, seed=5)


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("ours", NumericError, "the loss is nan"),
        ("foreign", RankFailed, r"rank 1: Traceback[\s\S]*seven by zero"),
        ("die", RankFailed, "rank 1 died with exit code -9"),
    ],
)
def test_a_failure_is_that_of_the_rank_and_the_next_call_has_fresh_ones(
    kept: KeptPool, how: str, kind: type[Exception], said: str
) -> None:
    before = kept.run(process, TWO)
    with pytest.raises(kind, match=said):
        kept.run(fail, TWO, how)
    assert not {*before} & {*kept.run(process, TWO)}
