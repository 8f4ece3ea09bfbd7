"""Aggregations under the layouts that cut their sums differently, against the oracle."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from mtrain.config.schema.loss import NORM_AGGREGATIONS, Aggregation
from tests.parity.batches import three_steps, two_steps, weighted_steps
from tests.parity.cases import Case, case, lean
from tests.parity.compare import (
    TOLERANCE,
    Row,
    assert_rows_exact,
    at_night,
    by_layout,
    deviation,
    relative,
    run_case,
    run_oracle,
    worst,
)
from tests.pool import Pool

CASES = [*map(lean, [case(), case(dp=2), case(cp=2), case(cp=2, cp_comm="ulysses", dp=2), case(tp=2, sp=True, pp=2)])]


def knobs(aggregation: str) -> dict[str, Any]:
    """Returns the aggregation and its constant, if it has one; the length is neither the row's width nor a mean."""
    length = {"loss__norm_length": 20} if aggregation in NORM_AGGREGATIONS else {}
    power = {"loss__length_power": 0.3} if aggregation == "seq-mean-token-power" else {}
    return {"loss__aggregation": aggregation, **length, **power}


def counting_empty_ones(aggregation: str) -> dict[str, Any]:
    """Counts sequences without a loss token in the denominator."""
    return knobs(aggregation) | {"loss__empty_sequences": "include"}


SEQUENCE_MEANS = ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ROWS = [
    *(Row(name, knobs(name), each, weighted_steps()[:2]) for name in get_args(Aggregation) for each in CASES),
    *(Row(name, counting_empty_ones(name), each, two_steps()) for name in SEQUENCE_MEANS for each in CASES[1:]),
]
TOGETHER: dict[str, Any] = {
    "loss__side_terms": {
        name: {key.removeprefix("loss__"): value for key, value in changes.items()}
        | {"coefficient": 0.01 if "token-sum" in name or name == "sum" else 0.3}
        for name, changes in (
            *((name, knobs(name)) for name in get_args(Aggregation)),
            *((f"{name} of all", counting_empty_ones(name)) for name in SEQUENCE_MEANS),
        )
    }
}
"""Terms with every aggregation in one run, weighted so that none outweighs the others."""


@pytest.mark.parametrize("case", CASES[2:], ids=str)
def test_all_aggregations_together(pool: Pool, case: Case) -> None:
    batches, config = weighted_steps()[:1], case.config(**TOGETHER)
    outcome, exact = run_case(pool, case, batches, **TOGETHER), run_oracle(config, batches)
    deviation(outcome, exact, config).assert_below()
    for term, total in outcome.steps[0].terms.items():
        assert relative(total.mean, exact[0].means[term]) < 1e-5, term


@pytest.mark.nightly  # the day has them together
@pytest.mark.parametrize("rows", by_layout(ROWS))
def test_aggregations_with_fractional_weights_and_empty_sequences(pool: Pool, rows: list[Row]) -> None:
    assert_rows_exact(pool, rows)


@pytest.mark.parametrize("aggregation", SEQUENCE_MEANS)
def test_empty_sequences_count_where_the_configuration_says_so(aggregation: str) -> None:
    """Tests the oracle, with which `test_all_aggregations_together` compares."""
    oracle = run_oracle(CASES[1].config(**counting_empty_ones(aggregation)), two_steps())
    assert [step.denominators["main"] for step in oracle] == [16.0, 16.0]
    excluded = run_oracle(CASES[1].config(**knobs(aggregation)), two_steps())
    assert [step.denominators["main"] for step in excluded] == [13.0, 2.0]


@pytest.mark.parametrize(
    "aggregation",
    # the roots have the same denominator as a mean over sequences
    ["token-mean", "seq-mean-token-mean", *map(at_night, ["seq-mean-token-sqrt", "seq-mean-token-power"])],
)
def test_a_denominator_below_one_is_not_clamped(pool: Pool, aggregation: str) -> None:
    """Checks that sample weights cancel, however small: the run equals that of weights 1."""
    one, batch = CASES[1], three_steps()[0]
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
