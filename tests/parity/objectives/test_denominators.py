"""Denominators and gradients of any size: exact where float32 can represent them, else refused before any update."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from mtrain.base.errors import NumericError
from mtrain.core.engine.optimizer import check_norm
from mtrain.core.step.totals import check_denominator, check_factors
from tests.fault_table import Notice
from tests.messages import refuses
from tests.parity import ranks
from tests.parity.batches import GlobalBatch, padded_steps, three_steps
from tests.parity.cases import Case, case, lean
from tests.parity.compare import at_night, deviation, initial_parameters, relative, run_case, run_oracle
from tests.parity.layouts.test_precision import GRADIENT_ROUNDINGS, ROUNDING, worst_distance
from tests.parity.models.test_balance import SOFTMAX
from tests.pool import Pool

CASES = [*map(lean, [case(dp=2), case(pp=2)])]
NIGHT = lean(case(tp=2, sp=True))
SMALL, LARGE = 1e-31, 3e34
"""Sample weights that bring 34 to 186 tokens near the ends of what is allowed: D from 3.4e-30 to 5.6e36."""
BF16 = {"train__precision": "bf16"}
FP16 = {"train__precision": "fp16", "train__initial_loss_scale": 2.0**10}
HUGE_LOSS: dict[str, Any] = {
    "loss__function": "tests.parity.losses:times",
    "loss__options": {"factor": 1e20},
    "optimizer__clip_grad": 0.0,
}


def weighted(batch: GlobalBatch, weight: float) -> GlobalBatch:
    """Gives each sample this weight: a mean over tokens does not change."""
    return [replace(sample, weight=weight) for sample in batch]


def refusals(pool: Pool, case: Case, batch: GlobalBatch, **changes: Any) -> list[str]:
    """Returns the error message of each rank's step."""
    config = case.config(**changes)
    return pool.run(ranks.numeric_error, case.resolved(config), config, initial_parameters(config), batch)


@pytest.mark.parametrize("case", [*CASES, at_night(NIGHT)], ids=str)  # weights do not matter to tensor ranks
@pytest.mark.parametrize("weight", [SMALL, LARGE])
def test_small_and_large_denominators_are_exact(pool: Pool, case: Case, weight: float) -> None:
    batches = [weighted(batch, weight) for batch in three_steps()[:2]]
    outcome = run_case(pool, case, batches)
    deviation(outcome, run_oracle(case.config(), batches), case.config()).assert_below()


@pytest.mark.parametrize("weight", [SMALL, LARGE])
@pytest.mark.parametrize("changes", [BF16, FP16], ids=["bf16", "fp16"])
def test_small_and_large_denominators_in_half_precision(pool: Pool, changes: dict[str, Any], weight: float) -> None:
    """Checks the same distance to the oracle as with weights of 1 (tests/parity/layouts/test_precision.py)."""
    one, batch = lean(case(pp=2), 4), weighted(three_steps()[0], weight)
    (step,) = run_case(pool, one, [batch], **changes).steps
    (exact,) = run_oracle(one.config(**changes), [batch])
    bound = 2 * math.sqrt(GRADIENT_ROUNDINGS) * ROUNDING[changes["train__precision"]]
    assert relative(step.grad_norm, exact.grad_norm) < bound
    assert worst_distance(step.gradients, exact, one.config(**changes)) < bound


def test_router_terms_with_a_small_denominator_are_exact(pool: Pool) -> None:
    one, batches = lean(case(tp=2, sp=True, etp=2)), [weighted(batch, SMALL) for batch in padded_steps()[:1]]
    config = one.config(**SOFTMAX)
    deviation(run_case(pool, one, batches, **SOFTMAX), run_oracle(config, batches), config).assert_below()


@pytest.mark.parametrize(
    ("weight", "changes"),
    [
        pytest.param(5e35, {}, id="fp32 large"),
        pytest.param(1e-33, BF16, id="bf16 small"),
        # the limits are of the denominator alone (test_limits_are_where_float32_ends)
        pytest.param(1e-42, {}, id="fp32 tiny", marks=pytest.mark.nightly),
        pytest.param(1e-39, BF16, id="bf16 tiny", marks=pytest.mark.nightly),
        pytest.param(1e-42, FP16, id="fp16 tiny", marks=pytest.mark.nightly),
        pytest.param(1e-39, SOFTMAX, id="routers tiny", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.fault(
    "numbers",
    "sample weights so small or large that gradients lose digits or 1/D overflows",
    happens="every rank stops before the update and says what to multiply",
    exit_code=4,
)
def test_a_denominator_that_float32_does_not_carry_is_refused(
    pool: Pool, changes: dict[str, Any], weight: float, notice: Notice
) -> None:
    """Has 1/D overflow at 1e-42; at 1e-39 float32 gradients are 1e-3 off and bf16 ones 0; at 5e35, D > 2^126."""
    one = lean(case(pp=2))
    with notice:
        messages = refusals(pool, one, weighted(three_steps()[0], weight), **changes)
    assert len(messages) == 2
    for message in messages:
        assert "the denominator of loss term 'main'" in message
        assert "must lie between 7.9e-31 and 8.5e+37" in message
    assert notice.exit_code == NumericError.exit_code


def test_a_factor_that_float32_does_not_carry_is_refused(pool: Pool) -> None:
    """Has 1e10 x 1 / 1.9e-29: each is allowed alone, but not their product."""
    z_term = {"function": "z_loss", "coefficient": 1e10, "aggregation": "token-mean"}
    changes = {"loss__aggregation": "sum", "loss__side_terms": {"z": z_term}}
    (message,) = refusals(pool, case(4), weighted(three_steps()[0], SMALL), **changes)
    assert "loss term 'z' has the factor 5.3" in message
    for factor in (2.0**127, 2.0**-127):
        with refuses(NumericError, "'z'"):
            check_factors({"main": 1.0, "z": 1e10}, {"main": factor, "z": 1e10})
    check_factors({"main": 1.0, "z": 1e10, "none": 1.0}, {"main": 2.0**126, "z": 1e10, "none": 0.0})


@pytest.mark.fault(
    "numbers",
    "a gradient whose square overflows in Adam's second moment",
    happens="every rank stops before the update",
    exit_code=4,
)
def test_a_gradient_whose_square_overflows_is_not_applied(pool: Pool, notice: Notice) -> None:
    """Has a finite loss and norm, but the second moment would be inf, and the weight would never move again."""
    with notice:
        messages = refusals(pool, case(4, dp=2), three_steps()[0], **HUGE_LOSS)
    assert len(messages) == 2
    for message in messages:
        assert "its square leaves the range of float32" in message
    assert notice.exit_code == NumericError.exit_code


def test_limits_are_where_float32_ends() -> None:
    for good in (0.0, 2.0**-100, 1.0, 2.0**126):
        check_denominator("main", good)
    for bad in (2.0**-100.001, 5e-324, 2.0**126.001):
        with refuses(NumericError):
            check_denominator("main", bad)
    check_norm(1e19, 0.0)
    check_norm(1e37, 1.0)
    for norm, clip in ((2e19, 0.0), (4e38, 1.0), (1e38, 1.0), (1e30, 1e-9), (math.inf, 1.0), (math.nan, 0.0)):
        with refuses(NumericError):
            check_norm(norm, clip)
