"""Gemma-3 and GPT-OSS under every kind of parallelism, against the oracle."""

from typing import Any

import pytest

from tests.parity.batches import documents_steps, three_steps
from tests.parity.cases import Case, case
from tests.parity.compare import deviation, run_case, run_oracle
from tests.parity.families import GEMMA, GPT_OSS
from tests.pool import Pool

FULL = {"train__recompute": "full"}
SELECTIVE = {"train__recompute": "selective"}
ISOLATED = {"data__isolate_documents": True}

CASES: list[tuple[dict[str, Any], Case]] = [
    (GEMMA, case(8)),
    (GEMMA | ISOLATED, case(4, tp=2, sp=True, pp=2, cp=2)),
    (GEMMA | FULL, case(4, tp=4, dp=2)),
    (GEMMA | ISOLATED | FULL, case(2, pp=2, vpp=2, cp=2, cp_comm="ulysses", dp=2)),
    (GEMMA, case(4, tp=2, sp=True, dp=2)),
    (GEMMA | SELECTIVE, case(4, pp=3, stage_layers=(2, 1, 1))),
    (GPT_OSS, case(8)),
    (GPT_OSS | ISOLATED, case(4, tp=2, sp=True, pp=2, cp=2, ep=4)),
    (GPT_OSS | ISOLATED | FULL, case(2, tp=2, sp=True, cp=2, cp_comm="ulysses", pp=2, ep=2)),
    (GPT_OSS | SELECTIVE, case(4, cp=4, cp_comm="ulysses", dp=2, ep=4)),
    (GPT_OSS, case(2, pp=2, vpp=2, cp=2, dp=2, ep=2)),
    (GPT_OSS, case(4, tp=4, sp=True, dp=2, ep=4)),
]


def named(changes: dict[str, Any], case: Case) -> Any:
    family = "gemma" if changes.keys() >= GEMMA.keys() else "gpt_oss"
    return pytest.param(changes, case, id=f"{family}-{case.resolved(case.config(**changes))}")


@pytest.mark.parametrize(("changes", "case"), [named(*each) for each in CASES])
def test_families_keep_the_promise(pool: Pool, changes: dict[str, Any], case: Case) -> None:
    batches = documents_steps() if changes.keys() & ISOLATED.keys() else three_steps()[:2]
    config = case.config(**changes)
    found = deviation(run_case(pool, case, batches, **changes), run_oracle(config, batches), config)
    print(case.layout, found)
    found.assert_below()
