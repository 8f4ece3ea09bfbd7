"""Our SwiGLU against its formula: the same bits, the derivative, and which feed-forward parts use it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from mtrain.arch.layout import Layout
from mtrain.core.layers.swiglu import Activation, activated
from mtrain.core.layers.transformer_config import transformer_config
from tests.config.samples import config

SWIGLU = Activation(functional.silu, is_gated=True, limit=None, offset=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_has_the_bits_of_the_formula(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    projected = (3 * torch.randn(5, 2, 2 * 7, generator=generator)).to(dtype).requires_grad_()
    gate, up = projected.chunk(2, dim=-1)
    expected, found = functional.silu(gate) * up, activated(projected, SWIGLU)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    weights = torch.randn(5, 2, 7, generator=generator).to(dtype)
    (wanted,), (gradient,) = (torch.autograd.grad(each, projected, weights) for each in (expected, found))
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=0)


def test_its_gradient_is_the_derivative() -> None:
    projected = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda given: activated(given, SWIGLU), (projected,))


@pytest.mark.parametrize(
    ("activation", "expected"),
    [("swiglu", True), ("swiglu_clamped", False), ("geglu_tanh", False), ("gelu", False)],
)
def test_other_activations_stay_as_they_are(activation: str, expected: bool) -> None:
    changes: dict[str, Any] = {"model__activation": activation}
    built = transformer_config(config(**changes), Layout(), torch.device("cpu"))
    assert Activation.of(built).is_swiglu == expected
