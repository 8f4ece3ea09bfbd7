"""Overlapped gathering waits in front of a module's own call, so a module with parameters must be called.

With few small buckets a neighbour's wait hides a weight that is only read; in a large model it would be read too early.
"""

from typing import Any

import pytest

from tests.core.model import call_ranks
from tests.parity.batches import three_steps
from tests.parity.cases import case
from tests.parity.expert_models import BIASED, DEEPSEEK, MIXTRAL
from tests.parity.families import DEEPSEEK_ATTENTION, GEMMA, GPT_OSS, OLMO2
from tests.pool import Pool

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma": GEMMA,
    "olmo2": OLMO2,
    "gpt_oss": GPT_OSS,
    "mla": DEEPSEEK_ATTENTION,
    "mixtral": MIXTRAL,
    "biased experts": BIASED,
    "deepseek": DEEPSEEK | DEEPSEEK_ATTENTION | {"model__mtp_depths": 1},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_every_module_with_parameters_is_called(pool: Pool, changes: dict[str, Any]) -> None:
    one = case(4)
    ((left, num_owners),) = pool.run(
        call_ranks.uncalled, one.resolved(one.config(**changes)), one.config(**changes), three_steps()[0]
    )
    assert left == []
    assert num_owners > 10
