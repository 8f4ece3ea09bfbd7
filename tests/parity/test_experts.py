"""Experts do not change with the layout: dispatched by either way, divided over ep and etp, beside every other axis."""

from typing import Any

import pytest

from tests.parity.batches import three_steps
from tests.parity.cases import Case, case
from tests.parity.compare import deviation, run_case, run_oracle
from tests.parity.expert_models import DEEPSEEK, MIXTRAL
from tests.pool import Pool

CASES = [
    (MIXTRAL, case(4)),
    (MIXTRAL, case(4, dp=2, ep=2)),
    (MIXTRAL, case(4, tp=2, sp=True)),
    (MIXTRAL, case(4, tp=2, sp=True, ep=2)),
    (MIXTRAL, case(4, tp=2, sp=True, etp=2)),
    (DEEPSEEK, case(4)),
    (DEEPSEEK, case(4, dp=2, ep=2)),
]


def named(model: dict[str, Any], case: Case) -> Any:
    name = "deepseek" if model is DEEPSEEK else "mixtral"
    return pytest.param(model, case, id=f"{name}-{case.resolved(case.config(**model))}")


@pytest.mark.parametrize(("model", "case"), [named(*each) for each in CASES])
def test_experts_do_not_change_with_the_layout(pool: Pool, model: dict[str, Any], case: Case) -> None:
    batches, config = three_steps(), case.config(**model)
    found = deviation(run_case(pool, case, batches, **model), run_oracle(config, batches), config)
    print(case.layout, found)
    found.assert_below()
