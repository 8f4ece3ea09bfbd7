"""Experts do not change with the layout: both dispatchers, divided over ep and etp, combined with every other axis."""

import math
from typing import Any, NamedTuple

import pytest

from mtrain.arch.layout import Layout
from tests.parity.batches import two_steps
from tests.parity.cases import Case, case, lean
from tests.parity.compare import (
    Row,
    assert_rows_exact,
    at_night,
    by_layout,
    deviation,
    relative,
    run_case,
    run_oracle,
)
from tests.parity.expert_models import BIASED, DEEPSEEK, MARGIN, MIXTRAL, QWEN, steps_of, with_experts
from tests.parity.layouts import test_precision as precision
from tests.pool import Pool


class Run(NamedTuple):
    """Model under a layout."""

    name: str
    changes: dict[str, Any]
    case: Case

    @property
    def layout(self) -> Layout:
        """Returns the layout of the case."""
        return self.case.resolved(self.case.config(**self.changes))

    def __str__(self) -> str:
        return f"{self.name}-{self.layout}".replace(" ", "_")


def gathered(model: dict[str, Any]) -> dict[str, Any]:
    """Makes tokens travel by all-gather."""
    return with_experts(model, dispatcher="allgather")


GATED = with_experts(DEEPSEEK, shared_gate=True)
PLAIN_OPTIMIZER = {"train__distributed_optimizer": False}
OVERLAP = {"train__overlap_grad_reduce": True, "train__overlap_param_gather": True}
RUNS = [
    Run("mixtral", MIXTRAL, case(4)),
    Run("mixtral", MIXTRAL, case(4, dp=2, ep=2)),
    Run("mixtral", MIXTRAL, case(4, tp=2, sp=True)),
    Run("mixtral", MIXTRAL, case(4, tp=2, sp=True, etp=2)),
    Run("mixtral", MIXTRAL, case(4, cp=2, ep=2)),
    Run("mixtral", MIXTRAL, case(4, tp=2, sp=True, cp=2, cp_comm="ring", ep=2)),
    Run("mixtral", MIXTRAL, case(2, pp=2, vpp=2, dp=2, ep=2)),
    Run("mixtral", MIXTRAL, case(4, tp=2, sp=True, dp=2, ep=4)),
    Run("mixtral", MIXTRAL, case(4, tp=2, sp=True, pp=2, dp=2, ep=2, etp=2)),
    Run("mixtral", MIXTRAL, case(4, tp=2, sp=True, cp=2, dp=2, ep=4, etp=2)),
    Run("mixtral by all-gather", gathered(MIXTRAL), case(4, dp=2, ep=2)),
    Run("mixtral by all-gather", gathered(MIXTRAL), case(4, tp=2, sp=True, dp=2, ep=2, etp=2)),
    Run("deepseek", DEEPSEEK, case(4)),
    Run("deepseek", DEEPSEEK, case(4, tp=2, sp=True, ep=2)),
    Run("deepseek", DEEPSEEK | PLAIN_OPTIMIZER, case(2, pp=4, dp=2, ep=2)),
    Run("deepseek", DEEPSEEK, case(4, tp=2, sp=True, pp=2, cp=2, ep=4)),
    Run("deepseek", DEEPSEEK, case(2, pp=2, cp=2, cp_comm="ring", dp=2, ep=4)),
    Run("deepseek by all-gather", gathered(DEEPSEEK), case(4, tp=2, sp=True, cp=2, cp_comm="ulysses", ep=2)),
    Run("shared gate", GATED, case(4)),
    Run("shared gate", GATED, case(4, tp=2, sp=True, pp=2, cp=2, ep=4)),
    Run("shared gate", GATED | PLAIN_OPTIMIZER, case(2, pp=2, cp=2, cp_comm="ring", dp=2, ep=4)),
    Run("biases", BIASED, case(4, tp=2, sp=True, dp=2, ep=2)),
    Run("qwen", QWEN, case(4, tp=2, sp=True, pp=2, ep=2)),
]


OPTIONS = [
    Run("recomputed", DEEPSEEK | {"train__recompute": "full"}, case(4, tp=2, sp=True, ep=2)),
    Run("recomputed in part", MIXTRAL | {"train__recompute": "selective"}, case(4, dp=2, ep=2)),
    Run("plain optimizer", MIXTRAL | PLAIN_OPTIMIZER, case(4, tp=2, sp=True, dp=2, ep=2)),
    Run(
        "overlapped",
        DEEPSEEK | OVERLAP,
        case(4, dp=4, ep=2),
    ),
    Run("one after the other", with_experts(MIXTRAL, implementation="sequential"), case(4, dp=2, ep=2)),
    Run("decayed", QWEN | {"optimizer__decay_norms_and_biases": True}, case(4, dp=2, ep=2)),
]


def row_of(run: Run) -> Row:
    """Makes a row of one step where another would add nothing, with few microbatches and layers; QWEN's seed needs
    four."""
    num_layers = 4 if run.changes.items() >= QWEN.items() else 2
    num_steps = 2 if run in OPTIONS or run.changes.items() >= OVERLAP.items() or run.name == "biases" else 1
    return Row(run.name, run.changes, lean(run.case, num_layers), steps_of(run.changes)[:num_steps])


FULL, SELECTIVE = {"train__recompute": "full"}, {"train__recompute": "selective"}
SEQUENTIAL = with_experts(MIXTRAL, implementation="sequential")
DAY = [
    Run("one after the other, recomputed in part", SEQUENTIAL | SELECTIVE, case(4, dp=2, ep=2)),
    Run("mixtral by all-gather", gathered(MIXTRAL), case(4, dp=2, ep=2)),
    Run("qwen, decayed", QWEN | {"optimizer__decay_norms_and_biases": True}, case(4, dp=2, ep=2)),
    Run("mixtral", MIXTRAL, case(4, tp=2, sp=True, etp=2)),
    Run("mixtral, overlapped", MIXTRAL | OVERLAP, case(2, pp=2, vpp=2, dp=2, ep=2)),
    Run("shared gate, recomputed", GATED | FULL, case(4, tp=2, sp=True, ep=2)),
    Run("deepseek by all-gather", gathered(DEEPSEEK), case(4, tp=2, sp=True, cp=2, cp_comm="ulysses", ep=2)),
    Run("biases", BIASED | PLAIN_OPTIMIZER, case(4, tp=2, sp=True, dp=2, ep=2)),
]
"""Runs by day: every model, option and axis once."""


@pytest.mark.parametrize("rows", by_layout(map(row_of, DAY), night=map(row_of, (*RUNS, *OPTIONS))))
def test_experts_do_not_change_with_the_layout(pool: Pool, rows: list[Row]) -> None:
    assert_choices_and_rows_exact(pool, rows)


def assert_choices_and_rows_exact(pool: Pool, rows: list[Row]) -> None:
    """Checks that the runs equal the oracle, and that no choice of experts depends on rounding."""
    for oracle in assert_rows_exact(pool, rows):
        assert min(step.margin for step in oracle) > MARGIN, "a token may go elsewhere in float32"


@pytest.mark.nightly  # a field of Megatron-Core that depends on the layout, and has to be permitted
def test_a_capacity_that_holds_all_tokens_drops_none(pool: Pool) -> None:
    """Has a capacity of top_k tokens per expert times 4, which takes every token of a microbatch; half of it cannot."""
    permitted = {"loss__allow_layout_dependent": True}
    roomy = Run("roomy", with_experts(MIXTRAL, capacity_factor=4.0) | permitted, case(4, dp=2, ep=2))
    assert_choices_and_rows_exact(pool, [row_of(roomy)])
    tight = with_experts(gathered(MIXTRAL), capacity_factor=0.5) | permitted
    batches, config = steps_of(MIXTRAL)[:1], case(4).config(**MIXTRAL)
    outcome = run_case(pool, case(8, dp=2, ep=2), batches, **tight)
    found = deviation(outcome, run_oracle(config, batches), config)
    assert 1e-3 < found.loss < 1


@pytest.mark.parametrize(
    "case",
    # the day has experts over tensor ranks in float32
    [lean(case(4, dp=2, ep=2)), *map(at_night, [lean(case(4)), lean(case(4, tp=2, sp=True, dp=2, ep=2))])],
    ids=["dp2 ep2", "one process", "tp2 dp2 ep2"],
)
def test_experts_in_bf16_are_near_the_oracle(pool: Pool, case: Case) -> None:
    """Uses all experts for every token, so that rounding changes no choice; bounds are as for dense models."""
    changes = with_experts(MIXTRAL, top_k=8, num_experts=8) | {"train__precision": "bf16"}
    batches, config = two_steps(), case.config(**changes)
    unit, steps = precision.ROUNDING["bf16"], run_case(pool, case, batches, **changes).steps
    for step, exact in zip(steps, run_oracle(config, batches), strict=True):
        assert step.terms["main"].denominator == exact.denominators["main"]
        assert relative(step.loss, exact.loss) < 2 * math.sqrt(precision.LOSS_ROUNDINGS) * unit
        bound = 2 * math.sqrt(precision.GRADIENT_ROUNDINGS) * unit
        assert relative(step.grad_norm, exact.grad_norm) < bound
        assert precision.worst_distance(step.gradients, exact, config) < bound
