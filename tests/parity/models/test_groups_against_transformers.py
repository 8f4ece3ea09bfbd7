"""Group-limited choice of experts as in DeepSeek-V3 of transformers, for any numbers of a folder."""

import json
from typing import Any

import pytest
import transformers

from mtrain.hf.schema.registry import FAMILIES
from tests.parity.cases import case
from tests.parity.compare import at_night
from tests.parity.models import test_against_transformers as plain
from tests.pool import Pool

CHOICES = [(2, 2), (3, 1), (2, 1), (4, 2), (4, 1), (3, 2), (5, 4)]
"""Pairs (experts of a token, groups that it may choose from), of 4 groups of 4 experts."""
DAY = [(2, 2), (3, 2), (5, 4)]
"""Choices by day: as many groups as experts, fewer, and all of them; one group is a case of fewer."""
CASES = [case(8), case(8, tp=2, sp=True, ep=2, etp=1, pp=2)]


def deepseek(top_k: int, num_kept_groups: int) -> tuple[dict[str, Any], Any]:
    """Builds the model from the config.json that transformers writes."""
    config = transformers.DeepseekV3Config(
        **plain.common() | {"num_key_value_heads": 8, "rms_norm_eps": 1e-3},
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        first_k_dense_replace=1,
        n_routed_experts=16,
        moe_intermediate_size=12,
        n_shared_experts=1,
        n_group=4,
        topk_group=num_kept_groups,
        num_experts_per_tok=top_k,
        num_mtp_layers=0,
    )
    model = FAMILIES["deepseek_v3"].model(json.loads(config.to_json_string(use_diff=False)))
    return {f"model__{name}": value for name, value in model.model_dump(exclude={"vocab_multiple"}).items()}, config


@pytest.fixture(
    scope="module",
    params=[choice if choice in DAY else at_night(choice) for choice in CHOICES],
    ids=[f"{choice[0]} of {choice[1]} groups" for choice in CHOICES],
)
def reference(request: pytest.FixtureRequest) -> plain.Reference:
    return plain.computed(lambda: deepseek(*request.param))


def test_the_choice_is_that_of_transformers(pool: Pool, reference: plain.Reference) -> None:
    plain.assert_like_the_reference(pool, reference, CASES[0])


@pytest.mark.nightly  # the day has groups over ranks in test_experts.py (DEEPSEEK)
@pytest.mark.parametrize("choice", [(2, 1), (5, 4)], ids=str)
def test_the_choice_is_the_same_on_several_ranks(pool: Pool, choice: tuple[int, int]) -> None:
    """Tests one group and all: a rank chooses for its own tokens, by any rule."""
    plain.assert_like_the_reference(pool, plain.computed(lambda: deepseek(*choice)), CASES[1])
