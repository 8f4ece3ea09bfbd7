"""Kept ranks answer again, and a failure arrives as from fresh ones and leaves no state."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mtrain.arch.layout import Layout
from mtrain.base.errors import NumericError
from tests.pool import RankFailed
from tests.verify.core.rank_functions import coordinates, die_once_there, drawn, fail, process
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
        ("foreign", RankFailed, r"^rank 1: ZeroDivisionError: seven by zero\nTraceback"),
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


def test_a_call_that_waited_for_one_that_failed_has_fresh_ones(kept: KeptPool, tmp_path: Path) -> None:
    path = tmp_path / "go"
    with ThreadPoolExecutor(2) as threads:
        failing = threads.submit(kept.run, die_once_there, TWO, str(path))
        waiting = threads.submit(kept.run, coordinates, TWO)
        path.touch()
        with pytest.raises(RankFailed, match="rank 0 died"):
            failing.result()
        assert waiting.result() == [(0, 0, 0, 0), (0, 0, 1, 0)]


def test_few_layouts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.verify.kept.MAX_LAYOUTS", 1)
    with KeptPool() as pool:
        (first,) = pool.run(process, Layout())
        assert len(pool.run(process, TWO)) == 2
        assert pool.run(process, Layout()) != [first]
