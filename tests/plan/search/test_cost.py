"""Parts of the cost model compared with arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mtrain import arch
from mtrain.arch.layout import Layout, broken_rules
from mtrain.config import Config
from mtrain.config.schema.layout import CpComm
from mtrain.plan.search import cost as layers
from mtrain.plan.search.candidates import candidates, section_of
from mtrain.plan.search.cost import StepTime, Workload, step_cost, step_mfu
from mtrain.plan.search.hardware import GPUS, Cluster, Group, exchanged, gathered, memory_size, reduced, sent
from mtrain.plan.search.search import with_layout
from tests.config.samples import config
from tests.parity.expert_models import DEEPSEEK, MIXTRAL
from tests.parity.families import DEEPSEEK_ATTENTION, GEMMA

IDEAL = Cluster(
    replace(GPUS["h100"], matrix_efficiency=1.0, attention_efficiency=1.0, grouped_share=1.0, memory_bandwidth=1e30),
    link_efficiency=1.0,
    nvlink_latency_s=0.0,
    network_latency_s=0.0,
)
"""A cluster that loses nothing."""
KINDS: tuple[CpComm, CpComm] = ("ring", "allgather")
NVLINK, NETWORK = 450e9, 50e9
WIDE = {"model__hidden_size": 512, "model__ffn_hidden_size": 1024, "data": {"kind": "mock", "seq_length": 256}}


def test_a_ring_inside_a_node_uses_nvlink() -> None:
    found = gathered(IDEAL, Group(4, 2), 8e9)
    assert found.seconds == pytest.approx(6e9 / NVLINK)
    assert (found.nvlink_bytes, found.network_bytes) == (6e9, 0)
    assert reduced(IDEAL, Group(4, 2), 8e9).seconds == pytest.approx(12e9 / NVLINK)


def test_a_ring_between_nodes_uses_the_cards_of_its_members() -> None:
    alone = gathered(IDEAL, Group(4, 8), 8e9)
    assert alone.seconds == pytest.approx(6e9 / NETWORK)
    assert (alone.nvlink_bytes, alone.network_bytes) == (0, 6e9)
    together = gathered(IDEAL, Group(16, 1), 16e9)  # eight in each of two nodes
    assert together.seconds == pytest.approx(15e9 / (8 * NETWORK))
    assert together.network_bytes == pytest.approx(15e9 / 8)


def test_an_exchange_takes_as_long_as_its_slower_link() -> None:
    far = exchanged(IDEAL, Group(16, 1), 16e9)
    assert far.seconds == pytest.approx(8e9 / NETWORK)
    assert (far.nvlink_bytes, far.network_bytes) == (7e9, 8e9)
    assert exchanged(IDEAL, Group(8, 1), 8e9).seconds == pytest.approx(7e9 / NVLINK)
    assert exchanged(IDEAL, Group(1, 1), 8e9).seconds == 0


def test_layers_with_heads_of_their_own_exchange_them() -> None:
    given = config(
        model__num_query_groups=2,
        model__head_dim=8,
        model__sliding_window=8,
        model__global_attention_every=2,
        model__global_attention={"head_dim": 32, "num_query_groups": 1},
        model__rope={"local_base": 100.0},
        layout={"cp": 2, "cp_comm": "allgather"},
    )
    windowed, of_wide = (
        layers.layer_cost(layers.Workload(given, Layout(cp=2), IDEAL), layer).cp.nvlink_bytes for layer in range(2)
    )
    assert of_wide == 2 * windowed  # one key head of 32 dimensions in the place of two of 8


def test_hops_of_a_ring_travel_during_the_products_of_the_hop_before() -> None:
    def costs(seq: int) -> tuple[layers.LayerCost, layers.LayerCost]:
        data = {"kind": "mock", "seq_length": seq}
        ring, gathers = (
            layers.layer_cost(layers.Workload(given, Layout(cp=2, cp_comm=kind), IDEAL), 0)
            for kind in KINDS
            for given in [config(layout={"cp": 2, "cp_comm": kind}, data=data)]
        )
        return ring, gathers

    ring, gathers = costs(64)
    assert ring.cp.nvlink_bytes == gathers.cp.nvlink_bytes
    # half of the products belong to the last hop, after which nothing is sent
    assert ring.cp.seconds == pytest.approx(gathers.cp.seconds - gathers.attention / 2)
    # in bf16 the gradients are twice as wide, and are sent there and back
    assert ring.cp_backward.nvlink_bytes == (1 + 2 * 2) * gathers.cp.nvlink_bytes
    assert ring.cp_backward.seconds == pytest.approx(5 * gathers.cp.seconds - 2.5 * gathers.attention / 2)
    ring, gathers = costs(65_536)
    assert (ring.cp.seconds, ring.cp_backward.seconds) == (0, 0)
    assert gathers.cp.seconds > 0


def test_stages_in_one_node_use_nvlink() -> None:
    assert sent(IDEAL, 4, 9e9).seconds == pytest.approx(9e9 / NVLINK)
    assert sent(IDEAL, 8, 9e9).network_bytes == 9e9


FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "gemma": GEMMA,
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK | DEEPSEEK_ATTENTION,
}


def ideal_mfu(given: Config, ranks: int) -> float:
    layout = Layout.from_config(given, ranks)
    time = step_cost(Workload(given, layout, IDEAL)).time
    return step_mfu(Workload(given, layout, IDEAL), time.matrices + time.attention)


@pytest.mark.parametrize("family", FAMILIES)
def test_where_nothing_is_lost_all_arithmetic_is_the_models(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of products and attention, at the peak, are the plan's own count of operations, except for what one
    counts once and the other twice: the second forward pass of scores, routers, joint projections."""
    monkeypatch.setattr(layers, "HALF_EFFICIENT", 0)
    given = config(**{**WIDE, **FAMILIES[family]}, train__recompute="none")
    exact = arch.run_flops_per_token(given)
    attention = exact - arch.run_flops_per_token(
        given.model_copy(update={"data": given.data.model_copy(update={"seq_length": 2})})
    )
    again = 1 + attention / 6 / exact  # backward computes the scores once more: 3.5 forward passes in the place of 3
    assert ideal_mfu(given, 1) * again == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("layout", [{"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2}, {}], ids=str)
def test_arithmetic_is_divided_over_all_ranks(layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "HALF_EFFICIENT", 0)
    alone, divided = (
        config(**WIDE, layout=each, train__recompute="none", model__vocab_size=256) for each in ({}, layout)
    )
    uneven = 1.05 if layout.get("pp") else 1.001  # the last stage has the logits
    assert 1 <= ideal_mfu(alone, 1) / ideal_mfu(divided, 2) < uneven


def time_of(given: Config, ranks: int) -> StepTime:
    return step_cost(Workload(given, Layout.from_config(given, ranks), Cluster(GPUS["h100"]))).time


def test_a_bubble_is_that_of_the_schedule() -> None:
    for layout, share in (({"pp": 4}, 3 / 16), ({"pp": 4, "vpp": 2}, 3 / 2 / 16)):
        time = time_of(config(layout=layout), 4)
        stage = time.matrices + time.attention + time.elementwise
        assert time.bubble / stage == pytest.approx(share)


def test_recomputing_more_takes_longer() -> None:
    names: list[dict[str, Any]] = [
        {"recompute": "none"},
        {"recompute": "selective"},
        {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]},
        {"recompute": "full", "recompute_layers": 7},
        {"recompute": "full"},
    ]
    base = {"global_batch_size": 16, "num_steps": 10}
    seconds = [time_of(config(**WIDE, train={**base, **each}), 1).recompute for each in names]
    assert seconds == sorted(set(seconds))
    assert seconds[0] == 0


def test_small_products_are_slower() -> None:
    work = layers.Workload(
        config(train={"global_batch_size": 16, "num_steps": 10, "precision": "bf16"}), Layout(), Cluster(GPUS["h100"])
    )
    large = layers.product_seconds(work, 4096, 8192, 4096)
    assert 8 * layers.product_seconds(work, 4096, 1024, 4096) > 1.05 * large
    assert large > 2 * 4096 * 8192 * 4096 / 989e12


def test_overlap_hides_sums_of_gradients() -> None:
    base = {"global_batch_size": 16, "num_steps": 10}
    shown = time_of(config(**WIDE, train=base), 16)
    hidden = time_of(config(**WIDE, train={**base, "overlap_grad_reduce": True, "overlap_param_gather": True}), 16)
    assert hidden.dp < shown.dp
    assert hidden.matrices == shown.matrices


def test_adapters_spare_the_gradients_of_frozen_matrices() -> None:
    whole, adapted = (time_of(config(**WIDE, adapter=each), 1) for each in (None, {"kind": "lora"}))
    assert adapted.matrices == pytest.approx(whole.matrices * 2 / 3)
    assert adapted.update < whole.update / 10


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_is_faster_than_its_bound(family: str) -> None:
    given = config(**FAMILIES[family])
    cluster = Cluster(GPUS["h100"])
    tried = 0
    for each in candidates(given, 8, cluster, 1 << 62):
        section = section_of(each.layout, given.model.num_layers)
        changed = with_layout(given, section, each.micro_batch_size)
        if broken_rules(changed, 8):
            continue
        layout = Layout.from_config(changed, 8)
        tried += 1
        assert step_cost(Workload(changed, layout, cluster)).time.total >= each.least_seconds * (1 - 1e-9)
    assert tried > 20


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("141 GB", 141 * 10**9), ("79.5GiB", int(79.5 * 2**30))]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert memory_size(text) == size
