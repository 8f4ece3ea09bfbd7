"""Faults of multi-head latent attention in plain megatron-core without TransformerEngine, and their absence here."""

from typing import Any

import numpy as np
import pytest

from mtrain.arch.layout import Layout
from tests.known_issues.mla_ranks import HEADS, HIDDEN, SIZES, Gradients, error_of_plain, our_gradients, plain_gradients
from tests.parity.compare import tensor_deviation
from tests.pool import Pool

SHARED = SIZES.kv_lora_rank
"""First row of the down-projection that produces the rotary key, which all heads share."""


@pytest.fixture(scope="module")
def weights() -> Gradients:
    rng = np.random.default_rng(0)
    assert SIZES.q_lora_rank is not None
    up_rows = HEADS * (SIZES.qk_nope_head_dim + SIZES.v_head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "linear_q_down_proj.weight": (SIZES.q_lora_rank, HIDDEN),
        "q_layernorm.weight": (SIZES.q_lora_rank,),
        "linear_q_up_proj.weight": (HEADS * SIZES.query_head_dim, SIZES.q_lora_rank),
        "linear_kv_down_proj.weight": (SIZES.kv_lora_rank + SIZES.qk_rope_head_dim, HIDDEN),
        "kv_layernorm.weight": (SIZES.kv_lora_rank,),
        "linear_kv_up_proj.weight": (up_rows, SIZES.kv_lora_rank),
        "linear_proj.weight": (HIDDEN, HEADS * SIZES.v_head_dim),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def single(pool: Pool, weights: Gradients) -> Gradients:
    """Returns the gradients of the plain module on one rank, where nothing is wrong."""
    found: Gradients = pool.run(plain_gradients, Layout(), weights, False)[0]
    return found


def whole(ranks: list[Gradients], name: str, shape: tuple[int, ...]) -> Any:
    """Assembles a gradient from its shards; copies must be equal to the last bit."""
    parts = [rank[name] for rank in ranks]
    for dim, size in enumerate(shape):
        if parts[0].shape[dim] != size:
            return np.concatenate(parts, dim)
    assert all(part.tobytes() == parts[0].tobytes() for part in parts)
    return parts[0]


def deviations(ranks: list[Gradients], exact: Gradients) -> dict[str, float]:
    return {name: tensor_deviation(whole(ranks, name, value.shape), value) for name, value in exact.items()}


def test_it_believes_in_transformer_engine(pool: Pool) -> None:
    """Shows a fault that is absent here: the module below uses megatron-core's parallel linears alone."""
    assert "isinstance() arg 2 must be a type" in pool.run(error_of_plain, Layout(), True)[0]


def test_its_core_attention_does_not_take_the_sizes(pool: Pool) -> None:
    """Shows a fault that is absent here: our core attention reads them from the tensors."""
    assert "k_channels" in pool.run(error_of_plain, Layout(), False)[0]


def test_the_shared_rotary_key_misses_gradients_under_tp(pool: Pool, weights: Gradients, single: Gradients) -> None:
    """Shows a fault that is absent here, see below and tests/parity/models/test_latent_attention.py."""
    ranks = pool.run(plain_gradients, Layout(tp=2), weights, False)
    found = deviations(ranks, single)
    down = whole(ranks, "linear_kv_down_proj.weight", single["linear_kv_down_proj.weight"].shape)
    assert found.pop("linear_kv_down_proj.weight") > 0.1
    assert tensor_deviation(down[:SHARED], single["linear_kv_down_proj.weight"][:SHARED]) < 1e-5
    assert tensor_deviation(down[SHARED:], single["linear_kv_down_proj.weight"][SHARED:]) > 0.1
    assert max(found.values()) < 1e-5


def test_the_flag_of_normalised_queries_sums_their_gradient_twice(
    pool: Pool, weights: Gradients, single: Gradients
) -> None:
    """Shows a fault that is absent here: config.qk_layernorm stays off, since latents are not heads."""
    ranks = pool.run(plain_gradients, Layout(tp=2), weights, True)
    np.testing.assert_allclose(ranks[0]["q_layernorm.weight"], 2 * single["q_layernorm.weight"], rtol=1e-4)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ours_is_the_plain_module_on_one_rank(pool: Pool, weights: Gradients, single: Gradients, tp: int) -> None:
    ranks = pool.run(our_gradients, Layout(tp=tp), weights)
    assert max(deviations(ranks, single).values()) < 1e-5
