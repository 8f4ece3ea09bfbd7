"""Weights that are sent by what has changed equal, bit for bit, those that are sent whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from mtrain.arch.layout import Layout
from mtrain.config import Config
from tests.parity.cases import Case, case
from tests.parity.expert_models import DEEPSEEK, MIXTRAL, with_experts
from tests.pool import Pool
from tests.training.engine_parts import delta_ranks
from tests.training.engine_parts.delta_ranks import Following

GLM = with_experts(DEEPSEEK, shared_ffn_hidden_size=16)
QWEN: dict[str, Any] = {
    "model__qk_norm": True,
    "model__experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16},
}
LORA: dict[str, Any] = {"adapter": {"rank": 2, "targets": ["qkv", "fc2"]}}
NOTHING, LITTLE, MUCH = 1e-13, 3e-5, 0.1
"""Learning rates at which no weight, some weights and almost all weights change in bfloat16."""


def checked(pool: Pool, one: Case, config: Config, how: Following) -> list[delta_ranks.Sync]:
    """Checks that the copies are the weights; returns the syncs of the first rank."""
    ranks = pool.run(delta_ranks.followed, one.resolved(config), config, how)
    for syncs in ranks:
        assert [each.differences for each in syncs] == [[] for _ in syncs]
        assert [each.number for each in syncs] == [each.number for each in ranks[0]]
        assert not how.everywhere or syncs == ranks[0]
    first: list[delta_ranks.Sync] = ranks[0]
    assert set(first[0].forms) == {"whole"}
    assert len(first[0].forms) == first[0].num_tensors
    return first


@pytest.mark.parametrize(
    ("one", "changes", "how"),
    [
        (case(2, num_layers=2, tp=2, sp=True, pp=2), {}, Following([LITTLE, NOTHING, MUCH], torch.bfloat16)),
        (case(2, num_layers=2, dp=2, ep=2), GLM, Following([LITTLE, MUCH], torch.bfloat16, everywhere=True)),
        (
            case(2, num_layers=1, cp=2),
            {"train__precision": "bf16", "train__overlap_grad_reduce": True, "train__overlap_param_gather": True},
            Following([LITTLE, NOTHING, MUCH]),
        ),
    ],
    ids=["tp2sp pp2", "ep2 everywhere", "cp2 bf16"],
)
def test_a_copy_is_the_weights_after_each_step(pool: Pool, one: Case, changes: dict[str, Any], how: Following) -> None:
    found = checked(pool, one, one.config(**changes), how)
    full, little = found[:2]
    assert "whole" not in little.forms
    assert little.num_bytes < full.num_bytes / 2
    if NOTHING in how.rates:
        assert found[2] == little._replace(num_bytes=0, forms=[]), "nothing is sent, and no number is used up"
    assert found[-1].number == len(found) - (NOTHING in how.rates)


@pytest.mark.parametrize(
    "content",
    ["adapter", "merged", pytest.param("base", marks=pytest.mark.nightly)],  # what is frozen does not change
)
def test_adapters_change_alone(pool: Pool, content: Any) -> None:
    one = case(2, num_layers=1, tp=2)
    found = checked(pool, one, one.config(**LORA), Following([MUCH, MUCH], content=content))
    num_changed = [len(each.forms) for each in found]
    match content:
        case "base":
            assert num_changed[1:] == [0, 0]
        case "adapter":
            assert num_changed == [8] * 3, "A and B of q, k, v and down"
        case _:
            assert num_changed[1:] == [4, 4], "q, k, v, down"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_changes_go_to_another_process(pool: Pool, ranks: int) -> None:
    """A receiver that needs all weights gets them, whichever rank says so; and nothing comes where nothing changed."""
    one = case(2, num_layers=1, tp=ranks)
    config = one.config()
    (first, *others) = pool.run(delta_ranks.broadcast, one.resolved(config), config)
    numbers, names, sizes, is_same = zip(*first, strict=True)
    assert all(is_same)
    assert numbers == (1, 2, 2, 3, 4)
    assert names[0] == names[1] == names[3] == names[4]
    assert (names[2], sizes[2]) == (0, 0)
    assert sizes[3] == sizes[4] == sizes[0]
    assert all(numbers == tuple(each[0] for each in found) for found in others)


def test_all_weights_follow_an_interrupted_sync(pool: Pool) -> None:
    config = case(2, num_layers=1).config()
    assert pool.run(delta_ranks.interrupted, Layout(), config) == [[True, False, False, True, False]]


MODELS = [{}, {"model__tied_embeddings": True}, {"model__ffn_hidden_size": 24, **MIXTRAL}, GLM, QWEN]


@st.composite
def runs(draw: DrawFn) -> tuple[Case, Config, Following]:
    """Draws a layout, a model, a precision, steps and the way of sending."""
    model = draw(st.sampled_from(MODELS))
    degrees: dict[str, Any] = {"tp": 1, "pp": 1, "cp": 1, "dp": 1}
    for axis in draw(st.lists(st.sampled_from(sorted(degrees)), max_size=2)):
        degrees[axis] *= 2
    degrees["sp"] = degrees["tp"] > 1
    if "model__experts" in model:
        degrees["ep"] = draw(st.sampled_from([1, degrees["tp"] * degrees["cp"] * degrees["dp"]]))
    one = case(1, num_layers=4, **degrees)
    precision = draw(st.sampled_from(["fp32", "bf16"]))
    adapter = draw(st.sampled_from([{}, {}, LORA]))
    how = Following(
        draw(st.lists(st.sampled_from([NOTHING, 1e-6, LITTLE, 1e-3, MUCH]), min_size=2, max_size=4)),
        draw(st.sampled_from([None, torch.bfloat16, torch.float16])),
        draw(st.sampled_from(["merged", "base", "adapter"])) if adapter else "merged",
        draw(st.booleans()),
        draw(st.sampled_from([1, 5000, 1 << 28])),
    )
    return one, one.config(train__precision=precision, **model, **adapter), how


@pytest.mark.nightly  # rows above by day
def test_copies_follow_drawn_runs(pool: Pool) -> None:
    @settings(
        derandomize=True, database=None, phases=[Phase.generate], deadline=None, max_examples=15,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(runs())
    def follow(run: tuple[Case, Config, Following]) -> None:
        checked(pool, *run)

    follow()
