"""Families that are tables alone, from the config.json that transformers writes to the run that it computes."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import transformers

from mtrain.hf.schema.registry import family_of
from tests.parity.cases import Case, case
from tests.parity.compare import at_night
from tests.parity.models import test_against_transformers as plain
from tests.pool import Pool

ALONE = case(8)
CASES = [ALONE, case(8, tp=2, sp=True, pp=2), case(4, tp=2, sp=True, cp=2, dp=2)]


def glm4_moe_lite() -> Any:
    return transformers.Glm4MoeLiteConfig(
        **plain.common() | {"num_key_value_heads": 8, "rms_norm_eps": 1e-3},
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=16,
        moe_intermediate_size=12,
        n_shared_experts=1,
        num_experts_per_tok=3,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )


def glm4_moe() -> Any:
    return transformers.Glm4MoeConfig(
        **plain.common() | {"rms_norm_eps": 1e-3},
        head_dim=12,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=16,
        moe_intermediate_size=12,
        n_shared_experts=1,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )


def smollm3() -> Any:
    own = {"no_rope_layer_interval": 2, "pad_token_id": None}
    theirs = {"rope_type": "default", "rope_theta": 500.0}
    return transformers.SmolLM3Config(**plain.common() | own, rope_parameters=theirs)


YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8}


def glm4_moe_yarn() -> Any:
    """Half of each head rotates, and only that half has yarn's factor."""
    found = glm4_moe()
    found.rope_parameters = YARN | {"partial_rotary_factor": 0.5, "attention_factor": 1.7}
    return found


def minimax_yarn() -> Any:
    """Queries and keys are normed over their full width before a part of each head rotates."""
    return transformers.MiniMaxM2Config(
        **plain.common() | {"rms_norm_eps": 1e-3, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=3,
        rope_parameters=YARN | {"partial_rotary_factor": 0.5},
    )


def smollm3_yarn() -> Any:
    """Layers without rotation have no factor."""
    return transformers.SmolLM3Config(
        **plain.common() | {"no_rope_layer_interval": 2, "pad_token_id": None},
        rope_parameters=YARN | {"attention_factor": 1.7},
    )


def phi3() -> Any:
    theirs = {"rope_type": "default", "rope_theta": 500.0}
    return transformers.Phi3Config(
        **plain.common() | {"pad_token_id": None, "sliding_window": 7}, rope_parameters=theirs
    )


def ministral3() -> Any:
    theirs = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 5}
    own = {"pad_token_id": None, "rope_parameters": theirs | {"llama_4_scaling_beta": 0.3}}
    return transformers.Ministral3Config(**plain.common() | own)


def qwen2_moe() -> Any:
    return transformers.Qwen2MoeConfig(
        **plain.common() | {"rms_norm_eps": 1e-3},
        num_experts=16,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=16,
        use_sliding_window=True,
        sliding_window=7,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )


FAMILIES = [glm4_moe_lite, glm4_moe, ministral3, phi3, qwen2_moe, smollm3, glm4_moe_yarn, minimax_yarn, smollm3_yarn]
RUNS = [(config, each) for config in FAMILIES for each in CASES]


def read(config: Any) -> tuple[dict[str, Any], Any]:
    """Returns the model that the family reads, and transformers' description of it."""
    said = json.loads(config.to_json_string(use_diff=False))
    family = family_of(said)
    model = family.model(family.as_held(said, ()))  # transformers writes the number of depths, and no weights of them
    return {f"model__{name}": value for name, value in model.model_dump(exclude={"vocab_multiple"}).items()}, config


@pytest.mark.parametrize(
    ("config", "each"),
    [run if run[1] == ALONE else at_night(*run) for run in RUNS],
    ids=[f"{config.__name__}-{each}" for config, each in RUNS],
)
def test_what_a_table_reads_trains_as_in_transformers(pool: Pool, config: Callable[[], Any], each: Case) -> None:
    plain.assert_like_the_reference(pool, plain.computed(lambda: read(config())), each)
