"""Collectives that two ranks swap, against their definition."""

from __future__ import annotations

import pytest
import torch

from mtrain.arch.layout import Layout
from tests.core.distributed import two_ranks_ranks as ranks
from tests.pool import Pool

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])  # gloo's work, not ours
def test_all_ranks_gather_and_scatter_by_definition(pool: Pool, num_ranks: int) -> None:
    """Two ranks swap halves; three leave the work to gloo."""
    for dtype in DTYPES:
        for in_place, async_op in ((False, False), (True, True)):
            found = pool.run(ranks.both, Layout(dp=num_ranks), dtype, in_place, async_op)
            gathered = torch.cat([ranks.own(rank, dtype, 2) for rank in range(num_ranks)]).flatten().tolist()
            summands = [ranks.own(rank, dtype, 2 * num_ranks) for rank in range(num_ranks)]
            for rank, each in enumerate(found):
                assert each.gathered == gathered
                rows = slice(2 * rank, 2 * rank + 2)
                # the sum of two numbers is unique; that of three in half precision depends on gloo's order
                if num_ranks == 2:
                    assert each.scattered == (summands[0] + summands[1])[rows].flatten().tolist()
                    assert each.names == [("send", "all-gather"), ("send", "reduce-scatter")]
                else:
                    exact = torch.stack(summands).double().sum(0)[rows].flatten().tolist()
                    assert each.scattered == pytest.approx(exact, rel=2e-2 if dtype == torch.bfloat16 else 1e-6)
                    assert each.names == [("_allgather_base_", None), ("_reduce_scatter_base_", None)]


def test_a_maximum_is_not_summed(pool: Pool) -> None:
    assert pool.run(ranks.maxima, Layout(dp=2)) == [[3.0], [1.0]]


def test_tensors_without_elements_are_no_halves(pool: Pool) -> None:
    assert pool.run(ranks.nothing, Layout(dp=2)) == [[0, 4]] * 2


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallelism_swaps_between_two_ranks(pool: Pool, tp: int) -> None:
    kinds = [
        name if stands_for is None else stands_for for name, stands_for in pool.run(ranks.of_megatron, Layout(tp=tp))[0]
    ]
    assert kinds == (["all-gather", "reduce-scatter"] if tp == 2 else ["_allgather_base_", "_reduce_scatter_base_"])
