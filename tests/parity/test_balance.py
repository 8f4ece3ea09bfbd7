"""Losses of routers and biases of the choice do not change with the layout, and count text alone."""

from typing import Any

import pytest

from tests.parity.batches import padded_steps
from tests.parity.cases import Case, case
from tests.parity.compare import deviation, run_case, run_oracle
from tests.parity.expert_models import DEEPSEEK, MIXTRAL
from tests.pool import Pool

LOSSES: dict[str, Any] = {"loss__router": {"z_coefficient": 0.05, "sequence_balance_coefficient": 0.3}}
MOVING = {"model__experts": {**DEEPSEEK["model__experts"], "bias_update_rate": 0.01}}
SOFTMAX, SIGMOID = {**MIXTRAL, **LOSSES}, {**MOVING, **LOSSES}

CASES: list[tuple[dict[str, Any], Case]] = [
    (SOFTMAX, case(4)),
    (SIGMOID, case(2)),
    (SOFTMAX, case(4, dp=2, ep=2)),
    (SIGMOID, case(1, dp=4, ep=4)),
    (SIGMOID, case(2, tp=2, sp=True, ep=2)),
    (SOFTMAX, case(2, tp=2, sp=True, etp=2)),
    (SIGMOID, case(2, cp=2, ep=2)),
    (SIGMOID, case(2, cp=2, cp_comm="ulysses", dp=2)),
    (SOFTMAX, case(2, pp=2)),
    (SIGMOID, case(2, pp=2, vpp=2)),
    (SIGMOID, case(1, pp=2, vpp=2, dp=2, ep=2)),
    (SIGMOID, case(2, tp=2, sp=True, cp=2, ep=4)),
    (SIGMOID, case(2, tp=2, sp=True, pp=2, dp=2, ep=2)),
    (SIGMOID, case(2, tp=2, sp=True, pp=2, vpp=2, cp=2, ep=2)),
]


def named(run: dict[str, Any], case: Case) -> Any:
    return pytest.param(
        run, case, id=f"{'softmax' if run is SOFTMAX else 'sigmoid'}-{case.resolved(case.config(**run))}"
    )


@pytest.mark.parametrize(("run", "case"), [named(*each) for each in CASES])
def test_balancing_does_not_change_with_the_layout(pool: Pool, run: dict[str, Any], case: Case) -> None:
    batches, config = padded_steps(), case.config(**run)
    found = deviation(run_case(pool, case, batches, **run), run_oracle(config, batches), config)
    print(case.layout, found)
    found.assert_below()
