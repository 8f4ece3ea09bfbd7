"""GPT-OSS of transformers with the same weights: loss, logits and every gradient, over ep, tp, cp and pp."""

from typing import Any

import pytest
import transformers

from tests.parity.cases import Case, case, lean
from tests.parity.compare import at_night
from tests.parity.families import GPT_OSS, GPT_OSS_ROPE
from tests.parity.models import test_against_transformers as dense
from tests.pool import Pool

CASES = [
    lean(each, 4)
    for each in (case(4), case(4, tp=2, sp=True, pp=2, ep=2), case(4, cp=2, cp_comm="ulysses", dp=2, ep=4))
]


def gpt_oss() -> tuple[dict[str, Any], Any]:
    sizes = {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 6}
    return GPT_OSS, transformers.GptOssConfig(**dense.common() | sizes, sliding_window=5, rope_parameters=GPT_OSS_ROPE)


@pytest.fixture(scope="module")
def reference() -> dense.Reference:
    return dense.computed(gpt_oss)


@pytest.mark.parametrize(
    "case",
    [CASES[0], *map(at_night, CASES[1:])],  # test_families.py has the layouts by day
    ids=["-".join(case.layout) or "one process" for case in CASES],
)
def test_gpt_oss_is_that_of_transformers(pool: Pool, reference: dense.Reference, case: Case) -> None:
    dense.assert_like_the_reference(pool, reference, case)
