"""Tolerances follow from their formula and leave no room for a fault."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mtrain.verify.core.result import KINDS
from mtrain.verify.core.shrink import shrink
from mtrain.verify.core.tolerances import Sizes, tolerances, update_tolerance
from tests.config.samples import config
from tests.parity.families import GEMMA4, GEMMA4_EXPERTS, HYBRID, MAMBA

_FORMULAS: dict[str, Callable[[Mapping[str, float]], float]] = {
    "s u sqrt(N)": lambda x: x["s"] * x["u"] * math.sqrt(x["N"]),
    "s u sqrt(2 N + T)": lambda x: x["s"] * x["u"] * math.sqrt(2 * x["N"] + x["T"]),
    "3 u": lambda x: 3 * x["u"],
    "s u": lambda x: x["s"] * x["u"],
    "s v": lambda x: x["s"] * x["v"],
    "0": lambda x: 0.0,
    "8 u64": lambda x: 8 * x["u64"],
    "T u64; 0 where all shares are whole or halves, quarters, ...": lambda x: x["T"] * x["u64"],
    "u (16 + 8 k)": lambda x: x["u"] * (16 + 8 * x["k"]),
}


@pytest.mark.parametrize(
    ("model", "has_float64", "is_judged_so"), [({}, True, False), (HYBRID, True, True), (HYBRID, False, False)]
)
def test_there_is_one_of_each_kind_and_its_formula_gives_its_value(
    model: dict[str, Any], has_float64: bool, is_judged_so: bool
) -> None:
    found = tolerances(shrink(config(**model), []).config, 4, has_float64)
    assert tuple(each.kind for each in found) == (KINDS if is_judged_so else KINDS[:-1])
    for each in found:
        assert each.value == pytest.approx(_FORMULAS[each.formula](each.inputs), rel=1e-12)
        assert each.meaning.endswith(".")


def test_they_are_far_below_what_a_fault_does() -> None:
    by_kind = {each.kind: each.value for each in tolerances(shrink(config(), []).config, 4)}
    assert by_kind["denominator"] < 1e-12
    assert 1e-6 < by_kind["loss"] < by_kind["gradient"] < 1e-4
    assert by_kind["grad_norm"] < 2e-7
    assert by_kind["update"] == update_tolerance(4) < 4e-6


def test_longer_sums_have_more_room() -> None:
    small, large = (
        {each.kind: each.value for each in tolerances(shrink(config(**sizes), []).config, 3)}
        for sizes in ({}, {"model__ffn_hidden_size": 256})
    )
    assert small["loss"] < large["loss"]
    assert small["gradient"] < large["gradient"]
    assert small["denominator"] == large["denominator"]


def test_layers_with_wider_heads_have_longer_sums() -> None:
    """A layer without a window has heads of its own: 4 of 32 dimensions in the place of 4 of 8."""
    windows: dict[str, Any] = {
        "model__sliding_window": 8,
        "model__global_attention_every": 2,
        "model__rope": {"local_base": 100.0},
    }
    sizes = {
        "model__num_layers": 2,
        "model__num_attention_heads": 4,
        "model__num_query_groups": 2,
        "model__head_dim": 8,
    }
    narrow, wide = (
        Sizes.of(config(**windows, **sizes, model__global_attention=heads)).summands
        for heads in (None, {"head_dim": 32, "num_query_groups": 1})
    )
    assert wide - narrow == (1 + 4) * (32 - 8)


@pytest.mark.parametrize(
    ("model", "is_in_float64"), [(GEMMA4, True), (GEMMA4_EXPERTS, True), (HYBRID, True), (MAMBA, True), ({}, False)]
)
def test_models_that_amplify_rounding_are_judged_in_float64(model: dict[str, Any], is_in_float64: bool) -> None:
    by_kind = {each.kind: each for each in tolerances(config(model__num_layers=4, **model), 1)}
    for kind in ("loss", "gradient"):
        assert ("in float64" in by_kind[kind].meaning) == (by_kind[kind].value < 1e-6) == is_in_float64
    assert ("rounding" in by_kind) == is_in_float64
