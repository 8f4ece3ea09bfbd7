"""Every aggregation under the layouts that cut its sums differently, against the oracle."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from mtrain.config.schema.loss import NORM_AGGREGATIONS, Aggregation
from tests.parity.batches import three_steps, weighted_steps
from tests.parity.cases import Case, case
from tests.parity.compare import TOLERANCE, deviation, relative, run_case, run_oracle, worst
from tests.pool import Pool

CASES = [
    case(4),
    case(4, dp=2),
    case(4, cp=2),
    case(2, cp=2, cp_comm="ulysses", dp=2),
    case(4, tp=2, sp=True, pp=2),
]


def knobs(aggregation: str) -> dict[str, Any]:
    """With the constant where the aggregation has one; the length is neither the row's width nor a mean."""
    length = {"loss__norm_length": 20} if aggregation in NORM_AGGREGATIONS else {}
    power = {"loss__length_power": 0.3} if aggregation == "seq-mean-token-power" else {}
    return {"loss__aggregation": aggregation, **length, **power}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_aggregations_with_fractional_weights(pool: Pool, aggregation: str, case: Case) -> None:
    batches, config = weighted_steps()[:2], case.config(**knobs(aggregation))
    outcome = run_case(pool, case, batches, **knobs(aggregation))
    deviation(outcome, run_oracle(config, batches), config).assert_below()


@pytest.mark.parametrize("case", CASES[1:], ids=str)
@pytest.mark.parametrize("aggregation", ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_empty_sequences_count_where_the_configuration_says_so(pool: Pool, aggregation: str, case: Case) -> None:
    changes = knobs(aggregation) | {"loss__empty_sequences": "include"}
    batches, config = three_steps(), case.config(**changes)
    oracle = run_oracle(config, batches)
    assert [step.denominators["main"] for step in oracle] == [16.0, 16.0, 16.0]
    excluded = run_oracle(case.config(**knobs(aggregation)), batches)
    assert [step.denominators["main"] for step in excluded] == [13.0, 13.0, 2.0]
    deviation(run_case(pool, case, batches, **changes), oracle, config).assert_below()


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sqrt", "seq-mean-token-power"]
)
def test_a_denominator_below_one_is_not_clamped(pool: Pool, aggregation: str) -> None:
    """Sample weights cancel, however small: the run is that of weights 1."""
    one, batch = case(4, dp=2), three_steps()[0]
    light = [replace(sample, weight=2.0**-12) for sample in batch]
    config = one.config(**knobs(aggregation))
    oracle = run_oracle(config, [batch])
    (step,) = run_case(pool, one, [light], **knobs(aggregation)).steps
    denominator = step.terms["main"].denominator
    assert 0 < denominator < 1
    assert denominator == pytest.approx(oracle[0].denominators["main"] * 2.0**-12, rel=1e-14)
    assert relative(step.loss, oracle[0].loss) <= TOLERANCE
    exact = {name: value.numpy() for name, value in oracle[0].gradients.items()}
    assert worst(step.gradients, exact, config) <= TOLERANCE
