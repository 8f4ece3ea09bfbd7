"""A flipped bit in one replica is found by name, on whatever axis it is replicated; equal replicas stay equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtrain.arch.layout import Layout
from mtrain.checkpoint.store.steps import published_steps
from tests.core.health import replica_ranks
from tests.core.state.test_save_and_load import configured
from tests.fault_table import Notice
from tests.pool import Pool
from tests.training.faults import numeric_fault_ranks

FC2 = "decoder.layers.mlp.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"
MOMENT = f"optimizer.state.exp_avg_sq.{NORM}"
EXPERTS = {"model.experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}}
WHOLE = {"train.distributed_optimizer": False}


@pytest.mark.parametrize(
    ("layout", "changes", "key", "named"),
    [
        (
            Layout(dp=3),
            WHOLE,
            FC2,
            "decoder.layers.0.mlp.linear_fc2.weight has different bits on rank 1 than on ranks 0, 2",
        ),
        # a moment, over tp: below
        pytest.param(
            Layout(dp=2),
            WHOLE,
            MOMENT,
            f"the optimizer's exp_avg_sq of {NORM} has different bits on each of ranks 0, 1",
            marks=pytest.mark.nightly,
        ),
        pytest.param(  # replicas of cp are compared with those of dp
            Layout(cp=2),
            WHOLE,
            FC2,
            "decoder.layers.0.mlp.linear_fc2.weight has different bits on each of ranks 0, 1",
            marks=pytest.mark.nightly,
        ),
        pytest.param(  # the norm's moment is below
            Layout(tp=2), {}, NORM, f"{NORM} has different bits on each of ranks 0, 1", marks=pytest.mark.nightly
        ),
        (Layout(tp=2), {}, MOMENT, f"the optimizer's exp_avg_sq of {NORM} has different bits on each of ranks 0, 1"),
        pytest.param(  # which ranks hold what: test_what_has_replicas_is_known_from_names_and_places
            Layout(dp=2, tp=2, ep=2),
            EXPERTS | {"train.precision": "bf16"},
            "decoder.layers.mlp.router.weight",
            "decoder.layers.0.mlp.router.weight has different bits on rank 1 than on ranks 0, 2, 3",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["weight-dp", "moment-dp", "weight-cp", "norm-tp", "moment of a norm-tp", "router-dp2tp2ep2"],
)
@pytest.mark.fault(
    "numbers",
    "one bit of one rank's replica flips: a weight, a moment or main weight; over dp, cp, tp or experts",
    happens="train.check_replicas_every_steps names tensor and rank; nothing is saved with it",
    exit_code=4,
)
def test_a_flipped_bit_in_a_replica_is_named(
    pool: Pool, tmp_path: Path, layout: Layout, changes: dict[str, Any], key: str, named: str, notice: Notice
) -> None:
    given = {"run.dir": str(tmp_path), "train.check_replicas_every_steps": 3, "checkpoint.interval_steps": 2}
    small = {"model.num_layers": 1, "train.global_batch_size": 2 * layout.dp, "train.micro_batch_size": 2}
    config = configured(**given, **small, **changes)
    with notice:
        endings = pool.run(numeric_fault_ranks.run, layout, config, f"flip rank=1 step=3 phase={key}:0")
    for ending in endings:
        assert ending.exit_code == notice.exit_code
        assert f"after step 3: {named}" in ending.message
        assert "go back to step 2" in ending.message
    assert published_steps(tmp_path / "checkpoints") == [2]


def test_what_a_save_would_hold_is_compared_first(pool: Pool, tmp_path: Path) -> None:
    """The next check by interval is far away, but a save is due."""
    small = {"model.num_layers": 1, "train.micro_batch_size": 2}
    config = configured(**{"run.dir": str(tmp_path), "checkpoint.interval_steps": 2, **small, **WHOLE})
    for ending in pool.run(numeric_fault_ranks.run, Layout(dp=2), config, f"flip rank=0 step=2 phase={FC2}:-1"):
        assert ending.exit_code == 4
        assert "after step 2: decoder.layers.0.mlp.linear_fc2.weight has different bits" in ending.message
    assert published_steps(tmp_path / "checkpoints") == []


def test_what_has_replicas_is_known_from_names_and_places(pool: Pool) -> None:
    """The layout is tp 2 x pp 2 with tied embeddings: the right tensors are compared, each flipped bit is found."""
    config = configured(**{"model.tied_embeddings": True, "train.precision": "bf16", "model.num_layers": 2})
    for found in pool.run(replica_ranks.flipped_one_by_one, Layout(tp=2, pp=2), config):
        assert found.equal == []
        assert found.flipped == found.compared
        assert any("embedding.word_embeddings.weight" in each for each in found.compared), "the tied table"
        assert not any("linear_fc2.weight" in each for each in found.compared), "each rank's alone"
