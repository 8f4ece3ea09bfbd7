"""Products with frozen matrices in lower precision than the other factor."""

from __future__ import annotations

from typing import Any

from torch import Tensor, autograd
from torch.autograd.function import once_differentiable
from torch.nn import functional


def widened_linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """Multiplies [..., columns] x [rows, columns] -> [..., rows], in the precision of the inputs.

    A weight in lower precision has to be frozen. It is converted for the product and again in backward, which keeps the
    weight as it is and nothing of the inputs; where both have one precision this is torch's own product.
    """
    if inputs.dtype == weight.dtype:
        return functional.linear(inputs, weight)
    assert not weight.requires_grad, "its gradient would be lost"
    result: Tensor = _WidenedLinear.apply(inputs, weight)  # type: ignore[no-untyped-call]
    return result


class _WidenedLinear(autograd.Function):
    """Converts in both passes; otherwise the graph would hold every matrix in the inputs' precision until backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(inputs, weight.to(inputs.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient.matmul(weight.to(gradient.dtype)), None
