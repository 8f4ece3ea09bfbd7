"""Mixtral and Qwen3-MoE of transformers with the same weights: loss, logits and every gradient, over ep and tp."""

from typing import Any

import pytest
import transformers

from tests.parity.cases import Case, case, lean
from tests.parity.compare import at_night
from tests.parity.expert_models import MIXTRAL, QWEN
from tests.parity.models import test_against_transformers as dense
from tests.pool import Pool

CASES = [lean(each, 4) for each in (case(4), case(4, tp=2, sp=True, dp=2, ep=2, etp=2), case(4, cp=2, ep=2))]


def mixtral() -> tuple[dict[str, Any], Any]:
    theirs = {"rope_type": "default", "rope_theta": 1e6}
    sizes = {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**dense.common() | sizes, rope_parameters=theirs)
    return MIXTRAL | {"model__rope": {"base": 1e6}}, config


def qwen3_moe() -> tuple[dict[str, Any], Any]:
    """Leaves norm_topk_prob out: the softmax is over all experts."""
    knobs = QWEN | {"model__tied_embeddings": False, "model__qk_norm": True, "model__head_dim": 16}
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": False}
    theirs = {"rope_type": "default", "rope_theta": 1e4}
    return knobs, transformers.Qwen3MoeConfig(**dense.common() | sizes, head_dim=16, rope_parameters=theirs)


@pytest.fixture(scope="module", params=[mixtral, qwen3_moe])
def reference(request: pytest.FixtureRequest) -> dense.Reference:
    return dense.computed(request.param)


@pytest.mark.parametrize(
    "case",
    [CASES[0], *map(at_night, CASES[1:])],  # test_experts.py has the layouts by day
    ids=["-".join(case.layout) or "one process" for case in CASES],
)
def test_experts_are_those_of_transformers(pool: Pool, reference: dense.Reference, case: Case) -> None:
    dense.assert_like_the_reference(pool, reference, case)
