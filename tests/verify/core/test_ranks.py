"""The pool of ranks: order of results, and how failures arrive."""

import os
from collections.abc import Callable

import pytest
import torch

from mtrain.base.errors import NumericError
from mtrain.plan.layout import Layout
from mtrain.verify.core import ranks
from mtrain.verify.core.ranks import Pool, RankFailedError
from tests.verify.core.rank_functions import cannot_use_it, coordinates, fail, tensor, uses_it

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
    ("how", "said"), [("foreign", r"rank 1: Traceback[\s\S]*seven by zero"), ("die", "rank 1 died with exit code -9")]
)
def test_other_failures_name_the_rank(pool: Pool, how: str, said: str) -> None:
    with pytest.raises(RankFailedError, match=said):
        pool.run(fail, TWO, how)
    assert pool.run(coordinates, Layout()) == [(0, 0, 0, 0)], "the next call has fresh ranks"


@pytest.mark.parametrize(("use", "start"), [(uses_it, "forkserver"), (cannot_use_it, "spawn")])
def test_ranks_on_gpus_are_forked_where_a_fork_can_use_cuda(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[], None], start: str
) -> None:
    monkeypatch.setattr(ranks, "_use_cuda", use)
    assert Pool("cuda")._context.get_start_method() == start
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1", "else torch asks the driver, and no fork can"
