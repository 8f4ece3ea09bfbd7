"""Gemma-3 and GPT-OSS under every kind of parallelism, against the oracle."""

from typing import Any

import pytest

from tests.parity.batches import documents_steps, three_steps
from tests.parity.cases import Case, case
from tests.parity.compare import deviation, run_case, run_oracle
from tests.parity.families import GEMMA, GPT_OSS_ATTENTION
from tests.pool import Pool

FULL = {"train__recompute": "full"}
SELECTIVE = {"train__recompute": "selective"}
ISOLATED = {"data__isolate_documents": True}

LAYOUTS: list[tuple[str, dict[str, Any], Case]] = [
    ("gemma", GEMMA, case(8)),
    ("gemma", GEMMA | ISOLATED, case(4, tp=2, sp=True, pp=2, cp=2, dp=1)),
    ("gemma", GEMMA | FULL, case(4, tp=4, dp=2)),
    ("gemma", GEMMA | ISOLATED | FULL, case(2, pp=2, vpp=2, cp=2, cp_comm="ulysses", dp=2)),
    ("gemma", GEMMA, case(4, tp=2, sp=True, dp=2)),
    ("gemma", GEMMA | SELECTIVE, case(4, pp=3, stage_layers=(2, 1, 1))),
    ("gpt_oss", GPT_OSS_ATTENTION, case(8)),
    ("gpt_oss", GPT_OSS_ATTENTION | ISOLATED, case(4, tp=2, sp=True, pp=2, cp=2)),
    ("gpt_oss", GPT_OSS_ATTENTION | ISOLATED | FULL, case(2, tp=2, cp=2, cp_comm="ulysses", pp=2)),
    ("gpt_oss", GPT_OSS_ATTENTION | SELECTIVE, case(4, cp=4, cp_comm="ulysses", dp=2)),
    ("gpt_oss", GPT_OSS_ATTENTION, case(2, pp=2, vpp=2, cp=2, dp=2)),
    ("gpt_oss", GPT_OSS_ATTENTION, case(4, tp=4, sp=True, dp=2)),
]


@pytest.mark.parametrize(("family", "changes", "case"), LAYOUTS, ids=lambda value: str(value)[:40])
def test_families_keep_the_promise(pool: Pool, family: str, changes: dict[str, Any], case: Case) -> None:
    batches = documents_steps() if changes.keys() & ISOLATED.keys() else three_steps()
    config = case.config(**changes)
    found = deviation(run_case(pool, case, batches, **changes), run_oracle(config, batches), config)
    print(family, case, found)
    found.assert_below()
