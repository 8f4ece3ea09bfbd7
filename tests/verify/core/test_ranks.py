"""The pool of ranks: order of results, and how failures arrive."""

import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtrain.arch.layout import Layout
from mtrain.base.errors import NumericError
from mtrain.verify.core import ranks
from mtrain.verify.core.ranks import Patience, Pool, RankFailedError
from tests.verify.core.rank_functions import (
    cannot_use_it,
    coordinates,
    fail,
    lock,
    sleep_for,
    tensor,
    uses_it,
    work_for,
)

TWO = Layout(dp=2)


def test_results_come_by_rank(pool: Pool) -> None:
    layout = Layout(tp=2, pp=2)
    assert pool.run(coordinates, layout) == [tuple(layout.coordinate(rank)) for rank in range(4)]


def test_tensors_outlive_the_ranks_that_sent_them(pool: Pool) -> None:
    for _ in range(5):
        assert [value.tolist() for value in pool.run(tensor, TWO, 1.5)] == [[1.5] * 3, [2.5] * 3]
    assert isinstance(pool.run(tensor, TWO, 0.0)[0], torch.Tensor)


def test_an_error_for_the_user_arrives_as_itself(pool: Pool) -> None:
    with pytest.raises(NumericError, match="the loss is nan"):
        pool.run(fail, TWO, "ours")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("foreign", r"^rank 1: ZeroDivisionError: seven by zero\nTraceback"),
        ("die", r"rank 1 died with exit code -9 \(Killed\)$"),
    ],
)
def test_other_failures_name_the_rank(pool: Pool, how: str, said: str) -> None:
    with pytest.raises(RankFailedError, match=said):
        pool.run(fail, TWO, how)
    assert pool.run(coordinates, Layout()) == [(0, 0, 0, 0)], "the next call has fresh ranks"


def test_ranks_remove_their_locks_before_they_end(pool: Pool) -> None:
    """Otherwise Python warns of leaked semaphores after the verdict."""
    assert not any(os.path.exists(path) for path in pool.run(lock, TWO))


@pytest.mark.parametrize(("use", "start"), [(uses_it, "forkserver"), (cannot_use_it, "spawn")])
def test_ranks_on_gpus_are_forked_where_a_fork_can_use_cuda(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[], None], start: str
) -> None:
    monkeypatch.setattr(ranks, "_use_cuda", use)
    assert Pool("cuda")._context.get_start_method() == start
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1", "else torch asks the driver, and no fork can"


@given(
    steps=st.lists(st.tuples(st.floats(0, 40), st.floats(0, 1)), min_size=1, max_size=60), timeout_s=st.floats(1, 600)
)
def test_only_ranks_that_use_no_processor_run_out_of_time(steps: list[tuple[float, float]], timeout_s: float) -> None:
    """The second number of a step is the share of a processor that was used during it."""
    patience, now, used = Patience(timeout_s), 0.0, 0.0
    assert not patience.has_ended(now, used)
    idle_s, since = 0.0, 0.0
    for seconds, share in steps:
        now, used = now + seconds, used + share * seconds
        idle_s, since = (0.0, used) if used - since >= 0.01 * timeout_s else (idle_s + seconds, since)
        if (ended := patience.has_ended(now, used)) or idle_s > 1.001 * timeout_s:
            assert ended, "they hang"
            assert idle_s > 0.999 * timeout_s, "they are at work"
            return


@pytest.mark.nightly  # seconds of work; by day its rule alone, above
def test_a_call_may_take_longer_than_its_ranks_may_be_idle() -> None:
    assert Pool(timeout_s=2).run(work_for, Layout(), 2.5) == [True]
    with pytest.raises(RankFailedError, match=r"ranks \[0\] have used no processor for 2 s and have not responded"):
        Pool(timeout_s=2).run(sleep_for, Layout(), 600.0)
