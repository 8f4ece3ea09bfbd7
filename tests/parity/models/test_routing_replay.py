"""Experts that a rollout chose are replayed in forward and backward, the same on every layout.

The oracle is the reference with its choice replaced (tests/parity/replay.py), and transformers with its own replaced.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import teacher_ranks
from tests.parity.batches import GlobalBatch, documents_steps, padded_steps, two_steps
from tests.parity.cases import Case, case, lean
from tests.parity.compare import (
    TEACHER_SEED,
    Row,
    assert_rows_exact,
    at_night,
    by_layout,
    deviation,
    initial_parameters,
    run_oracle,
)
from tests.parity.expert_models import BIASED, DEEPSEEK, MIXTRAL, QWEN, with_experts
from tests.parity.families import GEMMA4_EXPERTS, NEMOTRON
from tests.parity.models.test_balance import LOSSES, MOVING
from tests.parity.objectives.test_distillation import ALONE
from tests.parity.replay import with_routes
from tests.pool import Pool

FULL, SELECTIVE = {"train__recompute": "full"}, {"train__recompute": "selective"}
OVERLAP = {"train__overlap_grad_reduce": True, "train__overlap_param_gather": True}
SIGMOID = {**MOVING, **LOSSES}
SOFTMAX = {**MIXTRAL, **LOSSES}
VPP = case(2, pp=2, vpp=2, dp=2, ep=2)
DEPTHS = {**SIGMOID, "model__mtp_depths": 2}
DOCUMENTS = {"data__isolate_documents": True, "data__kind": "indexed", "data__train": [{"path": "unused"}]}


def row(name: str, changes: dict[str, Any], one: Case, batches: list[GlobalBatch], num_layers: int = 2) -> Row:
    """Makes a row whose samples name other experts than the routers would choose."""
    model = lean(one, num_layers).config(**changes).model
    return Row(name, changes, lean(one, num_layers), [with_routes(batch, model) for batch in batches])


DAY = [
    row("softmax", SOFTMAX, case(4), two_steps()),
    row("sigmoid", SIGMOID, case(4), padded_steps()),
    row("qwen, recomputed in part", {**QWEN, **SELECTIVE}, case(4, dp=2, ep=2), two_steps()[:1]),
    row("sigmoid, recomputed", {**SIGMOID, **FULL}, case(4, tp=2, sp=True, ep=2), padded_steps()[:1]),
    # chunks of one stage have no experts, or some: routes go by the layer, not by the place in a chunk
    row("dense first", {**with_experts(SOFTMAX, first_dense_layers=1), **OVERLAP}, VPP, two_steps()[:1], num_layers=4),
    row("depths", DEPTHS, case(2, pp=2, cp=2, cp_comm="ring", ep=2), padded_steps()[:1]),
    row("documents", {**SIGMOID, **DOCUMENTS}, case(2, cp=2, ep=2), documents_steps()[:1]),
    row("nemotron", {**NEMOTRON, **DOCUMENTS}, case(4, tp=2, sp=True, ep=2), documents_steps()[:1], num_layers=4),
    row("every other layer", BIASED, case(4, tp=2, sp=True, ep=2), two_steps()[:1], num_layers=4),
]
"""Rows by day: each kind of router, each axis, recomputation and depths once."""
NIGHT = [
    *(
        row("sigmoid", SIGMOID, each, padded_steps())
        for each in (
            case(1, dp=4, ep=4),
            case(2, tp=2, sp=True, etp=2),
            case(2, cp=2, cp_comm="ulysses", dp=2),
            case(2, tp=2, sp=True, cp=2, ep=4),
            case(2, tp=2, sp=True, cp=2, cp_comm="ring"),
            case(2, tp=2, sp=True, pp=2, dp=2, ep=2),
            case(2, tp=2, sp=True, pp=2, vpp=2, cp=2, ep=2),
        )
    ),
    row("branches", {**GEMMA4_EXPERTS, **LOSSES, **DOCUMENTS}, case(4, tp=2, sp=True, ep=2), documents_steps()[:1], 4),
    row("uneven stages", SIGMOID, case(pp=3, stage_layers=(1, 1, 2)), two_steps()[:1]),
    row("by all-gather", with_experts(DEEPSEEK, dispatcher="allgather"), case(4, dp=2, ep=2), two_steps()[:1]),
    row("one after the other", with_experts(MIXTRAL, implementation="sequential"), case(4, dp=2, ep=2), two_steps()),
    row("depths, recomputed", {**DEPTHS, **FULL}, case(2, tp=2, sp=True, pp=2, vpp=2), padded_steps()[:1]),
]


@pytest.mark.parametrize("rows", by_layout(DAY, night=NIGHT))
def test_a_replay_does_not_change_with_the_layout(pool: Pool, rows: list[Row]) -> None:
    """Compares losses, router losses, biases, gradient norm, every gradient and the updated weights."""
    assert_rows_exact(pool, rows)


@pytest.mark.parametrize("one", [case(4, tp=2, sp=True, pp=2), at_night(case(4, cp=2))], ids=["tp2sp pp2", "cp2"])
def test_a_teacher_chooses_for_itself(pool: Pool, one: Case) -> None:
    """Has a teacher with other weights and other experts, of which the batch names too many."""
    changes = {**SOFTMAX, **ALONE}
    teacher = lean(one).config(**with_experts(MIXTRAL, num_experts=6))
    found = row("taught", changes, one, two_steps()[:1])
    given = (found.config, initial_parameters(found.config), teacher, initial_parameters(teacher, TEACHER_SEED))
    layout = found.case.resolved(found.config)
    reports = pool.run(teacher_ranks.train_with_teacher, layout, *given, found.batches)
    exact = run_oracle(found.config, found.batches, teacher)
    deviation(reports[0].outcome, exact, found.config).assert_below()
