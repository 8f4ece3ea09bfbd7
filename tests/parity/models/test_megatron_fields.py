"""Every field that `model.megatron` lets through, on two layouts at least, against the oracle."""

from collections import defaultdict
from typing import Any

import pytest

from mtrain.config import megatron_fields
from tests.parity.batches import three_steps
from tests.parity.cases import Case, case
from tests.parity.compare import deviation, run_case, run_oracle
from tests.parity.expert_models import MIXTRAL, steps_of
from tests.pool import Pool

BIASES = {"model__linear_bias": True}
INTERLEAVED = case(2, pp=2, vpp=2)
WARM_UP = {"overlap_p2p_comm_warmup_flush": True}
RUNS: list[tuple[dict[str, Any], Case, dict[str, Any]]] = [
    *[({"deterministic_mode": True}, layout, {}) for layout in (case(4), case(4, tp=2, sp=True), case(2, pp=2, cp=2))],
    *[({"microbatch_group_size_per_vp_stage": size}, INTERLEAVED, {}) for size in (2, 3, 4)],
    ({"microbatch_group_size_per_vp_stage": 4}, case(1, pp=2, vpp=2, cp=2), {}),
    *[({"fp32_residual_connection": True}, layout, {}) for layout in (case(4, tp=2, sp=True), case(4, pp=2))],
    *[({"batch_p2p_comm": False}, layout, {}) for layout in (case(4, pp=2), case(2, pp=4), INTERLEAVED)],
    ({"batch_p2p_comm": True, "overlap_p2p_comm": False}, case(2, num_layers=8, pp=4, vpp=2), {}),
    *[({"overlap_p2p_comm": False}, layout, {}) for layout in (INTERLEAVED, case(1, pp=2, vpp=2, dp=2))],
    *[(WARM_UP, layout, {}) for layout in (INTERLEAVED, case(2, num_layers=8, pp=4, vpp=2))],
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
        ({"no_rope_freq": pattern}, layout, {})
        for pattern in (2, [1, 0, 0, 1])
        for layout in (case(4), case(4, tp=2, sp=True), case(4, cp=2, cp_comm="ulysses"), case(2, pp=2, vpp=2))
    ],
]


def named(value: object) -> str:
    """Test ids."""
    if isinstance(value, dict):
        return ",".join(f"{name.removeprefix('model__')}={given}" for name, given in value.items())[:60] or "plain"
    assert isinstance(value, Case)
    return named({**value.layout, "mbs": value.micro_batch_size})


@pytest.mark.parametrize(("fields", "case", "changes"), RUNS, ids=named)
def test_a_field_that_passes_keeps_the_promise(
    pool: Pool, fields: dict[str, Any], case: Case, changes: dict[str, Any]
) -> None:
    changes = {**changes, "model__megatron": fields}
    batches = steps_of(changes) if "model__experts" in changes else three_steps()
    config = case.config(**changes)
    deviation(run_case(pool, case, batches, **changes), run_oracle(config, batches), config).assert_below()


def test_every_field_that_passes_runs_on_two_layouts() -> None:
    layouts: dict[str, set[str]] = defaultdict(set)
    for fields, each, _ in RUNS:
        for name in fields:
            layouts[name].add(str(each.layout))
    assert layouts.keys() == megatron_fields.PROVEN.keys()
    assert {name: len(found) for name, found in layouts.items() if len(found) < 2} == {}
