"""Multi-head latent attention: the same run under every layout, and that of transformers."""

from typing import Any

import pytest

from tests.parity.batches import documents_steps, three_steps
from tests.parity.cases import Case, case
from tests.parity.compare import deviation, run_case, run_oracle
from tests.pool import Pool

LATENT: dict[str, Any] = {
    "model__num_query_groups": None,
    "model__mla": {"q_rank": 24, "kv_rank": 20, "nope_head_dim": 6, "rope_head_dim": 4, "value_head_dim": 10},
    "model__rope": {
        "base": 300.0,
        "scaling": "yarn",
        "factor": 4.0,
        "original_max_positions": 16,
        "beta_fast": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "interleaved": True,
    },
}
"""As DeepSeek-V3 has it."""
DIRECT = LATENT | {
    "model__mla": {"kv_rank": 12, "nope_head_dim": 10, "rope_head_dim": 6, "value_head_dim": 4},
    "model__rope": {"base": 300.0},
}
"""Queries without a latent, pairs in halves, values narrower than keys."""
SELECTIVE, FULL = {"train__recompute": "selective"}, {"train__recompute": "full"}
ISOLATED = {"data__isolate_documents": True}

ROWS: list[tuple[str, dict[str, Any], Case]] = [
    ("latent", LATENT, case(4)),
    ("latent", LATENT, case(4, tp=2)),
    ("latent", LATENT, case(2, tp=4, sp=True)),
    ("latent", LATENT, case(4, cp=4)),
    ("latent", LATENT, case(2, cp=2, cp_comm="ulysses", dp=2)),
    ("latent", LATENT, case(4, pp=2, vpp=2)),
    ("latent", LATENT, case(4, tp=2, sp=True, pp=2, dp=2)),
    ("latent", LATENT, case(4, tp=2, sp=True, pp=2, cp=2)),
    ("latent, recomputed core", LATENT | SELECTIVE, case(4, tp=2, cp=2, cp_comm="ulysses", dp=2)),
    ("latent, recomputed", LATENT | FULL, case(4, tp=2, sp=True, cp=2, cp_comm="ulysses")),
    ("direct", DIRECT, case(4, tp=4, cp=2)),
    ("direct, recomputed core", DIRECT | SELECTIVE, case(4, tp=2, sp=True, cp=2)),
    ("direct, tied", DIRECT | {"model__tied_embeddings": True}, case(4, tp=2, sp=True, pp=4)),
]
DOCUMENTS: list[tuple[str, dict[str, Any], Case]] = [
    ("latent", LATENT | ISOLATED, case(4, tp=2, sp=True, cp=2)),
    ("latent", LATENT | ISOLATED, case(2, pp=2, vpp=2, cp=2)),
    ("direct, recomputed core", DIRECT | ISOLATED | SELECTIVE, case(4, cp=4, cp_comm="ulysses")),
]


def named(value: object) -> str | None:
    """Test ids: names and layouts."""
    return None if isinstance(value, dict) else str(value).replace(" ", "_")


@pytest.mark.parametrize(("name", "changes", "case"), ROWS, ids=named)
def test_rows_under_every_kind_of_layout(pool: Pool, name: str, changes: dict[str, Any], case: Case) -> None:
    batches, config = three_steps(), case.config(**changes)
    deviation(run_case(pool, case, batches, **changes), run_oracle(config, batches), config).assert_below()


@pytest.mark.parametrize(("name", "changes", "case"), DOCUMENTS, ids=named)
def test_documents_restart_positions(pool: Pool, name: str, changes: dict[str, Any], case: Case) -> None:
    batches, config = documents_steps(), case.config(**changes)
    deviation(run_case(pool, case, batches, **changes), run_oracle(config, batches), config).assert_below()
