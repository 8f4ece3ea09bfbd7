"""Weight gradients that matrix products accumulate themselves; tests/parity compares the numbers."""

from collections import Counter
from typing import Any

import pytest
import torch

from mtrain.arch.layout import Layout
from mtrain.core.kernels import add_product
from tests.core.engine.weight_gradient_ranks import step
from tests.core.state.test_save_and_load import BF16, TIED, configured
from tests.pool import Pool

APART = {"model.megatron": {"gradient_accumulation_fusion": False}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added(dtype: torch.dtype) -> None:
    inputs, gradients = torch.randn(7, 3).to(dtype), torch.randn(7, 5).to(dtype)
    total = before = torch.randn(5, 3)
    expected = before.double() + gradients.double().t() @ inputs.double()
    add_product(inputs, gradients, total)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), expected, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-2)


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_every_linear_layer_adds_its_own(pool: Pool, precision: dict[str, str]) -> None:
    """The table, by which the loss multiplies, has its gradient once."""
    changes = TIED | precision | {"train.micro_batch_size": 2}
    given = [configured(**changes, **APART), configured(**changes)]
    plain, fused = (pool.run(step, Layout(), config)[0] for config in given)
    assert plain.shapes == []
    # two microbatches of four layers: queries, keys and values; their projection; gate and up; down
    assert Counter(fused.shapes) == {(96, 32): 2 * 8, (32, 32): 8, (32, 48): 8}
    for one, other in zip(plain.gradients, fused.gradients, strict=True):
        torch.testing.assert_close(
            torch.tensor(other), torch.tensor(one), rtol=0.05 if precision else 1e-5, atol=1e-3 if precision else 1e-6
        )


MODELS: dict[str, dict[str, Any]] = {
    "adapter": {"adapter.rank": 4},
    "depths": {"model.mtp_depths": 2},
    "fp8": {"model.backend": "torch", "train.fp8": "hybrid"},
    "latent attention": {
        "model.mla": {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
        "model.num_query_groups": None,
        "model.qk_norm": False,
        "model.qkv_bias": False,
    },
    "shared experts": {
        "model.experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16}
    },
    "computed again": {
        "train.recompute": "selective",
        "train.recompute_modules": ["core_attn", "mlp"],
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_other_layers_have_the_same_gradients(pool: Pool, name: str) -> None:
    given = [configured(**MODELS[name], **APART), configured(**MODELS[name])]
    plain, fused = (pool.run(step, Layout(), config)[0] for config in given)
    assert (len(fused.shapes) == 0) == (name == "adapter")  # what is frozen has none, and adapters are no such layers
    for one, other in zip(plain.gradients, fused.gradients, strict=True):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=1e-5, atol=1e-6)
