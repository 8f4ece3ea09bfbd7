"""The search finds what trying everything would find, and evaluates little of it."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.arch.layout import Layout, broken_rules
from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.schema.layout import CpComm
from mtrain.hf.configuration import load_config
from mtrain.plan.search.candidates import candidates, section_of, stage_split
from mtrain.plan.search.cost import Workload, step_cost
from mtrain.plan.search.hardware import GIB, GPUS, USABLE_MEMORY, Cluster
from mtrain.plan.search.report import nothing_fits
from mtrain.plan.search.search import heaviest, is_legal, recomputations, search, with_layout
from mtrain.plan.search.verdict import smallest_change, verdict, with_keys
from tests.config.samples import config
from tests.messages import refuses
from tests.paths import CONFIGS

H100 = Cluster(GPUS["h100"])


def of(model: str, *changes: str) -> Config:
    return load_config([CONFIGS / "model" / f"{model}.yaml", CONFIGS / "run" / "pretrain.yaml"], changes)


def all_that_fit(given: Config, num_gpus: int, usable: int) -> list[float]:
    """Returns seconds of the fastest choice of each division of the weights, ascending; no bound is used."""
    best: dict[tuple[Any, ...], float] = {}
    for each in candidates(given, num_gpus, H100, 1 << 62):
        changed = with_layout(given, section_of(each.layout, given.model.num_layers), each.micro_batch_size)
        if broken_rules(changed, num_gpus):
            continue
        layout = Layout.from_config(changed, num_gpus)
        for tried in recomputations(changed):
            if heaviest(tried, layout).total_bytes <= usable and is_legal(tried):
                key = (layout.tp, layout.pp, layout.ep, layout.etp, layout.cp, layout.shard)
                best[key] = min(best.get(key, 1e30), step_cost(Workload(tried, layout, H100)).time.total)
                break
    return sorted(best.values())


EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 1024}


@pytest.mark.parametrize(  # experts add degrees to the same search
    "experts", [None, pytest.param(EXPERTS, marks=pytest.mark.nightly)], ids=["dense", "experts"]
)
def test_nothing_faster_is_overlooked(experts: dict[str, int] | None) -> None:
    sizes = {"model__hidden_size": 1024, "model__ffn_hidden_size": 4096, "model__vocab_size": 32000}
    given = config(**sizes, model__experts=experts, train__precision="bf16", data={"kind": "mock", "seq_length": 4096})
    memory = int(2.2 * GIB)
    found = search(given, 8, H100, memory, 4)
    expected = all_that_fit(given, 8, int(memory * USABLE_MEMORY))
    assert [each.cost.time.total for each in found.choices] == pytest.approx(expected[:4])
    assert found.counts.tried < found.counts.bounded
    for each in found.choices:
        assert broken_rules(each.config, 8) == []
        assert heaviest(each.config, each.layout).total_bytes <= memory * USABLE_MEMORY


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "tried", "measured"),
    [
        ("llama3_8b", 10_000, 10_000, 100, 100),
        # with experts, a few of many by day: test_nothing_faster_is_overlooked
        pytest.param("qwen3_30b_a3b", 1024, 2048, 6000, 900, marks=pytest.mark.nightly),
    ],
)
def test_few_of_many_layouts_are_tried(model: str, gpus: int, batch: int, tried: int, measured: int) -> None:
    found = search(of(model, f"train.global_batch_size={batch}"), gpus, H100, 80 * GIB)
    assert found.counts.tried <= tried
    assert found.counts.measured <= measured
    assert found.counts.bounded > 5 * found.counts.tried
    assert len(found.choices) == 5


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, ["allgather", "ulysses", "ring"]),
        ({"model__sliding_window": 512}, ["allgather", "ulysses"]),
        ({"model__attention_sinks": True}, ["allgather", "ulysses"]),
        ({"data__isolate_documents": True}, ["allgather", "ulysses"]),
    ],
)
def test_every_kind_of_context_parallelism_is_a_candidate_where_it_is_known(
    changes: dict[str, Any], kinds: list[CpComm]
) -> None:
    given = config(**changes, data__seq_length=4096)
    found = [each.layout for each in candidates(given, 4, H100, 1 << 62)]
    assert list(dict.fromkeys(each.cp_comm for each in found if each.cp > 1)) == kinds
    assert {each.cp_comm for each in found if each.cp == 1} == {"allgather"}
    for kind in kinds:
        each = next(each for each in found if (each.cp, each.cp_comm) == (2, kind))
        assert Config.model_validate({**given.model_dump(), "layout": section_of(each, given.model.num_layers)})


def test_long_rows_are_given_to_a_ring() -> None:
    """A ring's hops are hidden by products, while an all-gather has to come before them."""
    given = of("llama3_8b", "train.global_batch_size=16", "data.seq_length=131072")
    best = search(given, 32, H100, 80 * GIB, 1).choices[0]
    assert best.layout.cp_comm == best.config.layout.cp_comm == "ring"
    assert best.cost.time.cp < 0.01 * best.cost.time.total


def test_uneven_stages_leave_room_for_embeddings_and_logits() -> None:
    assert stage_split(32, 4, 1) == {}
    assert stage_split(61, 16, 1) == {"first_stage_layers": 3, "last_stage_layers": 2}
    assert stage_split(126, 16, 1) == {"first_stage_layers": 7, "last_stage_layers": 7}
    assert stage_split(31, 8, 1) == {"last_stage_layers": 3}
    assert stage_split(33, 32, 1) == {} or stage_split(33, 32, 1) is None


def test_what_fits_nowhere_says_what_is_closest() -> None:
    given = of("deepseek_v3", "train.global_batch_size=512")
    found = search(given, 64, H100, 80 * GIB)
    assert found.choices == []
    assert found.closest is not None
    text = str(nothing_fits(given, found, 64, 80 * GIB))
    assert f"the closest layout is {found.closest.layout}" in text
    assert "too many; the largest part is optimizer" in text


def test_a_batch_that_no_layout_divides_says_which_would() -> None:
    given = of("llama3_8b", "train.global_batch_size=1021")
    found = search(given, 10_000, H100, 80 * GIB)
    assert found.closest is None
    text = str(nothing_fits(given, found, 10_000, 80 * GIB))
    assert "use --global-batch-size 10000, or --gpus 1021" in text
    assert search(of("llama3_8b", "train.global_batch_size=10000"), 10_000, H100, 80 * GIB, 1).choices


@pytest.mark.parametrize(
    ("changes", "ranks", "memory", "reported"),
    [
        ({"train.recompute": "none", "train.micro_batch_size": 2}, 8, 80, "set layout."),
        (
            {"train.distributed_optimizer": False, "layout.tp": 2, "layout.sp": True, "train.recompute": "full"},
            64,
            40,
            "set train.distributed_optimizer=true,",
        ),
        (
            {"loss.chunk_tokens": "whole", "train.recompute": "full", "layout.tp": 2, "layout.sp": True},
            8,
            40.5,
            "set loss.chunk_tokens=1024,",
        ),
    ],
)
def test_the_smallest_change_makes_it_fit(changes: dict[str, Any], ranks: int, memory: float, reported: str) -> None:
    given = with_keys(of("llama3_8b", "data.seq_length=8192", "train.overlap_param_gather=false"), changes)
    assert given is not None
    with refuses(ConfigError) as refused:
        verdict(given, ranks, H100, int(memory * GIB))
    assert reported in str(refused.value)
    change = smallest_change(given, ranks, H100, int(memory * GIB))
    assert change is not None
    changed = with_keys(given, change.keys)
    assert changed is not None
    assert verdict(changed, ranks, H100, int(memory * GIB)).startswith("fits: ")


def test_where_two_keys_are_not_enough_a_layout_is_named() -> None:
    given = of("llama3_8b", "train.global_batch_size=32", "data.seq_length=131072")
    with refuses(ConfigError):
        verdict(given, 32, H100, 15 * GIB)
