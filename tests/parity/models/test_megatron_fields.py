"""Every field that `model.megatron` lets through, on two layouts at least, against the oracle."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from mtrain.config import megatron_fields
from tests.parity.batches import two_steps
from tests.parity.cases import Case, case, lean
from tests.parity.compare import Row, assert_rows_exact, by_layout
from tests.parity.expert_models import MIXTRAL, steps_of
from tests.pool import Pool

BIASES = {"model__linear_bias": True}
INTERLEAVED = case(4, pp=2, vpp=2)
APART = {"gradient_accumulation_fusion": False}
WARM_UP = {"overlap_p2p_comm_warmup_flush": True}
RUNS: list[tuple[dict[str, Any], Case, dict[str, Any]]] = [
    *[({"deterministic_mode": True}, layout, {}) for layout in (case(4), case(4, tp=2, sp=True), case(2, pp=2, cp=2))],
    *[({"microbatch_group_size_per_vp_stage": size}, case(2, pp=2, vpp=2), {}) for size in (2, 3, 4)],
    ({"microbatch_group_size_per_vp_stage": 4}, case(4, pp=2, vpp=2, cp=2), {}),
    *[({"fp32_residual_connection": True}, layout, {}) for layout in (case(4, tp=2, sp=True), case(4, pp=2))],
    *[({"batch_p2p_comm": False}, layout, {}) for layout in (case(4, pp=2), case(4, pp=4), INTERLEAVED)],
    ({"batch_p2p_comm": True, "overlap_p2p_comm": False}, case(4, num_layers=8, pp=4, vpp=2), {}),
    *[({"overlap_p2p_comm": False}, layout, {}) for layout in (INTERLEAVED, case(2, pp=2, vpp=2, dp=2))],
    *[(WARM_UP, layout, {}) for layout in (INTERLEAVED, case(4, num_layers=8, pp=4, vpp=2))],
    *[({"bias_activation_fusion": True}, layout, {}) for layout in (case(4), case(4, tp=2, sp=True), case(4, cp=2))],
    *[({"bias_activation_fusion": True}, layout, BIASES) for layout in (case(4, tp=2), case(4, pp=2))],
    *[({"bias_activation_fusion": True}, layout, MIXTRAL) for layout in (case(4), case(2, dp=2, ep=2))],
    *[({"bias_dropout_fusion": True}, layout, {}) for layout in (case(4), case(4, tp=2, sp=True))],
    *[({"bias_dropout_fusion": True}, layout, BIASES) for layout in (case(4, tp=2, sp=True), case(4, pp=2, cp=2))],
    *[
        ({"clone_scatter_output_in_embedding": False}, layout, {})
        for layout in (case(4, tp=2, sp=True), case(2, tp=2, sp=True, cp=2))
    ],
    *[
        (APART, layout, changes)
        for layout in (case(4), case(2, tp=2, sp=True, dp=2), case(2, pp=2, vpp=2), case(4, tp=2, cp=2))
        for changes in ({}, BIASES, {"model__tied_embeddings": True})
    ],
    *[(APART, layout, MIXTRAL) for layout in (case(4), case(2, dp=2, ep=2), case(4, tp=2, sp=True))],
    (APART, case(2, dp=2), {"train__overlap_grad_reduce": True, "train__overlap_param_gather": True}),
    (APART, case(4, tp=2, sp=True), {"train__recompute": "full"}),
    *[
        ({"no_rope_freq": pattern}, layout, {})
        for pattern in (2, [1, 0, 0, 1])
        for layout in (case(4), case(4, tp=2, sp=True), case(4, cp=2, cp_comm="ulysses"), case(2, pp=2, vpp=2))
    ],
]


def rows() -> Iterator[Row]:
    """Yields rows; fields that schedule microbatches among stages keep their number; a pattern of layers has four of
    them."""
    for fields, each, changes in RUNS:
        batches = steps_of(changes)[:2] if "model__experts" in changes else two_steps()[:1]
        num_layers = 4 if "no_rope_freq" in fields else 2
        few = each if "pp" in each.layout else lean(each, num_layers)
        yield Row(str(fields), changes | {"model__megatron": fields}, few, batches)


DAY: list[tuple[dict[str, Any], Case, dict[str, Any]]] = [
    (
        {
            "deterministic_mode": True,
            "fp32_residual_connection": True,
            "bias_dropout_fusion": True,
            "clone_scatter_output_in_embedding": False,
            "no_rope_freq": [1, 0],
        },
        case(4, tp=2, sp=True),
        BIASES,
    ),
    ({"bias_activation_fusion": True, "no_rope_freq": 2}, case(4, tp=2, sp=True), BIASES),
    ({"bias_activation_fusion": True}, case(2, dp=2, ep=2), MIXTRAL),
    ({"microbatch_group_size_per_vp_stage": 4} | WARM_UP, case(2, pp=2, vpp=2), {}),
    ({"overlap_p2p_comm": False}, case(2, pp=2, vpp=2), {}),
    ({"batch_p2p_comm": False}, case(4, pp=2), {}),
    (APART, case(2, tp=2, sp=True, dp=2), {"model__tied_embeddings": True, "train__overlap_grad_reduce": True}),
]
"""Fields by day, each once, combined with others that it does not touch."""


def day() -> Iterator[Row]:
    """Yields the rows by day."""
    for fields, each, changes in DAY:
        batches = (steps_of(changes) if "model__experts" in changes else two_steps())[:1]
        yield Row(
            str(fields), changes | {"model__megatron": fields}, each if "pp" in each.layout else lean(each), batches
        )


@pytest.mark.parametrize("rows", by_layout(day(), night=rows()))
def test_fields_that_pass_keep_the_promise(pool: Pool, rows: list[Row]) -> None:
    assert_rows_exact(pool, rows)


def test_every_field_that_passes_runs_on_two_layouts() -> None:
    layouts: dict[str, set[str]] = defaultdict(set)
    for fields, each, _ in RUNS:
        for name in fields:
            layouts[name].add(str(each.layout))
    assert layouts.keys() == megatron_fields.PROVEN.keys() == {name for fields, *_ in DAY for name in fields}
    assert {name: len(found) for name, found in layouts.items() if len(found) < 2} == {}
