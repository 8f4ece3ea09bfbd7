"""Batches that are hard on a loss: what they hold, and that they do not depend on the layout."""

from typing import Any

import numpy as np
import pytest
import torch

from mtrain.config import Config
from mtrain.verify.core.samples import NUM_HARD_KINDS, Batches, HardBatch, SamplePlan
from mtrain.verify.core.shrink import shrink
from tests.config.samples import config

PLAN = SamplePlan(0, 2 * NUM_HARD_KINDS)


def small(micro_batch_size: int = 16, **changes: Any) -> Config:
    user = shrink(config(**changes), []).config
    train = user.train.model_copy(update={"micro_batch_size": micro_batch_size})
    return user.model_copy(update={"train": train})


@pytest.mark.parametrize("changes", [{}, {"data__isolate_documents": True}], ids=str)
def test_masks_are_ragged_weighted_and_sparse_in_turn(changes: dict[str, Any]) -> None:
    ragged, weighted, sparse = (HardBatch(small(**changes), number).samples() for number in range(3))
    shares = [float((sample.mask > 0).mean()) for sample in ragged]
    assert min(shares) == 0
    assert any(0 < share < 0.05 for share in shares)
    assert max(shares) > 0.8
    assert all(sample.weight == 1 and set(np.unique(sample.mask)) <= {0.0, 1.0} for sample in ragged)
    assert len({sample.weight for sample in weighted}) > 2
    assert len({value for sample in weighted for value in np.unique(sample.mask)}) > 3
    assert sum(bool(sample.mask.any()) for sample in sparse) == 2


def test_documents_have_edges_that_no_loss_token_crosses() -> None:
    every = HardBatch(small(data__isolate_documents=True), 0).samples()
    found = [sample for sample in every if sample.document_starts is not None]
    assert 0 < len(found) < len(every), "others come as data of a program and as records"
    for sample in found:
        starts = sample.document_starts
        assert starts is not None
        edges = np.flatnonzero(np.diff(starts)) + 1
        assert len(edges) == 3
        assert (starts[edges] == edges).all()
        assert not sample.mask[edges - 1].any()


def test_some_rows_are_not_full() -> None:
    length = small().data.seq_length
    assert {sample.width for sample in HardBatch(small(), 0).samples()} == {length, length - length // 4}


@pytest.mark.parametrize(("dp", "size"), [(1, 16), (2, 4), (4, 1), (8, 2)])
def test_ranks_share_one_global_batch(dp: int, size: int) -> None:
    (whole,) = Batches(small(), PLAN, 0, 1).of_step(1)
    parts = [Batches(small(size), PLAN, rank, dp).of_step(1) for rank in range(dp)]
    rows = [batch.tokens for microbatches in zip(*parts) for batch in microbatches]
    assert torch.cat(rows).equal(whole.tokens)
    shares = sum(float(batch.denominator_weights["main"].sum()) for rank in parts for batch in rank)
    assert shares == pytest.approx(float(whole.denominator_weights["main"].sum()), rel=1e-14)


def test_steps_differ_and_come_back_with_the_seed() -> None:
    tokens = [Batches(small(), PLAN, 0, 1).of_step(step)[0].tokens for step in range(PLAN.num_steps)]
    assert not any(tokens[a].equal(tokens[b]) for a in range(6) for b in range(a))
    assert Batches(small(), PLAN, 0, 1).of_step(2)[0].tokens.equal(tokens[2])
    assert not Batches(small(train__seed=5), PLAN, 0, 1).of_step(2)[0].tokens.equal(tokens[2])
