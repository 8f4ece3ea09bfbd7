"""`mtrain plan` chooses divided weights where they pay, and counts their transfers."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.plan.search.cost import Workload, step_cost
from mtrain.plan.search.hardware import GIB, GPUS, Cluster
from mtrain.plan.search.report import chosen_content
from mtrain.plan.search.search import search
from mtrain.plan.search.verdict import smallest_change
from tests.core.engine.sharded_weights_ranks import traffic
from tests.parity.batches import two_steps
from tests.parity.cases import case, lean
from tests.plan.search.test_cost import IDEAL
from tests.plan.search.test_search import H100, of
from tests.pool import Pool

WITHOUT_SWITCHES = ("train.overlap_grad_reduce=false", "train.overlap_param_gather=false")
SMALL = ("train.global_batch_size=64", "data.seq_length=4096")


@pytest.mark.parametrize("changes", [{}, {"model__tied_embeddings": True}, {"train__recompute": "full"}], ids=str)
def test_a_step_sends_what_is_planned(pool: Pool, changes: dict[str, Any]) -> None:
    one = lean(case(4, dp=2))
    config = one.config(layout__shard="weights", **changes)
    layout = one.resolved(config)
    planned = step_cost(Workload(config, layout, IDEAL)).sent
    for seen in pool.run(traffic, layout, config, two_steps()[0]):
        sent = (seen.gathered + seen.summed) / 2 * 4
        assert planned.nvlink_bytes == pytest.approx(sent, rel=0.01)
        assert planned.network_bytes == 0


def test_transfers_hide_behind_layers_unless_the_network_is_slow() -> None:
    given = of("qwen3_32b", *SMALL, "layout.shard=weights", *WITHOUT_SWITCHES)
    near, far = (
        step_cost(Workload(given, Layout.from_config(given, 8), Cluster(GPUS["h100"], gpus_per_node=size))).time
        for size in (8, 1)
    )
    assert near.dp < 0.06 * near.total
    assert far.dp > 0.5 * far.total
    assert far.matrices == near.matrices


def test_32b_is_sharded_on_eight_gpus() -> None:
    """Only divided weights fit, and the user's keys for overlap, which divided weights refuse, are left out."""
    given = of("qwen3_32b", *SMALL)
    assert given.train.overlap_param_gather
    found = search(given, 8, H100, 80 * GIB)
    assert {each.layout.shard for each in found.choices} == {"weights"}
    written = chosen_content(found.choices[0], given.model_dump())
    assert Config.model_validate(written).layout.shard == "weights"


def test_optimizer_shards_stay_where_they_are_as_fast() -> None:
    given = of("llama3.2_1b", "train.global_batch_size=256", "data.seq_length=4096")
    assert search(given, 8, H100, 80 * GIB, 1).choices[0].layout.shard == "optimizer"


def test_a_run_that_does_not_fit_hears_of_sharded_weights() -> None:
    given = of("qwen3.5_27b", *SMALL, "train.recompute=full")
    change = smallest_change(given, 8, H100, 80 * GIB)
    assert change is not None
    assert change.keys["layout.shard"] == "weights"
