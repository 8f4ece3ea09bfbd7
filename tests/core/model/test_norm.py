"""RMSNorm on CPUs against the definition in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.core.layers.norm import Norm, RmsNormOnCpu

SIZE = 48


def norm(zero_centered: bool = False) -> Norm:
    fields: dict[str, Any] = {"layernorm_zero_centered_gamma": zero_centered, "normalization": "RMSNorm"}
    fields |= {"params_dtype": torch.float32, "use_cpu_initialization": True, "sequence_parallel": False}
    given: Any = SimpleNamespace(**fields)
    module = Norm(given, SIZE, eps=1e-3)
    with torch.no_grad():
        module.weight.add_(torch.randn(SIZE, generator=torch.Generator().manual_seed(0)), alpha=0.25)
    return module


def by_definition(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden / (hidden.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight


def gradients(output: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return torch.autograd.grad((output * weights).sum(), leaves)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_outputs_and_gradients_are_those_of_the_definition(zero_centered: bool, transposed: bool) -> None:
    """Tokens have all magnitudes, zero included; the transposed case has the strides of heads that are views."""
    module = norm(zero_centered)
    hidden = torch.randn(5, 3, SIZE, generator=torch.Generator().manual_seed(1)) * 10 ** torch.linspace(-3, 3, 5).view(
        5, 1, 1
    )
    hidden[2, 1] = 0.0
    hidden = (hidden.transpose(0, 1) if transposed else hidden).requires_grad_()
    wide = hidden.detach().double().requires_grad_()
    weight = module.weight.detach().double().requires_grad_()
    expected = by_definition(wide, 1 + weight if zero_centered else weight)
    output = module(hidden)
    torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-6)
    for found, exact in zip(gradients(output, hidden, module.weight), gradients(expected, wide, weight), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_it_is_the_derivative_and_keeps_the_input_alone() -> None:
    hidden = torch.randn(3, 2, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *given: RmsNormOnCpu.apply(*given, 1e-3), (hidden, weight))
    assert torch.autograd.gradcheck(lambda given: RmsNormOnCpu.apply(given, weight.detach(), 1e-3), (hidden,))
    assert torch.autograd.gradcheck(lambda given: RmsNormOnCpu.apply(hidden.detach(), given, 1e-3), (weight,))
    kept: list[int] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved.numel())
        return saved

    tokens = torch.randn(4, 2, SIZE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        norm()(tokens)
    assert sum(kept) == tokens.numel() + SIZE + 4 * 2


def test_half_precision_stays_with_torch() -> None:
    module = norm().to(torch.bfloat16)
    hidden = torch.randn(4, SIZE, dtype=torch.bfloat16)
    expected = torch.nn.functional.rms_norm(hidden, (SIZE,), module.weight, 1e-3)
    assert torch.equal(module(hidden), expected)
