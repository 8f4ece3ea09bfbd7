"""Products of linear layers with an operand in lower precision.

Frozen bfloat16 weights are widened to the precision of the inputs. Gradients of half-precision weights are added to
their float32 buffer without a separate pass, for which megatron-core calls apex's extension
(`gradient_accumulation_fusion`). torch has the same products, in float32 everywhere, and on GPUs from half-precision
factors to float32, so that the gradient of a microbatch is never rounded. Other devices compute the product and add it,
as without fusion.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, autograd
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mtrain.core.kernels import add_product


def widened(x: Tensor) -> Tensor:
    """Converts to float32; wider dtypes stay."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def widened_linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """Multiplies inputs, [..., columns], by a weight, [rows, columns], to [..., rows], in the precision of the inputs.

    A frozen weight in lower precision is converted for the product, and again in backward, so that only the narrow
    weight is saved.
    """
    if inputs.dtype == weight.dtype:
        return functional.linear(inputs, weight)
    assert not weight.requires_grad, "its gradient would be lost"
    return _WidenedLinear.apply(inputs, weight)  # type: ignore[no-untyped-call]


class _WidenedLinear(autograd.Function):
    """Converts the weight in both passes, since otherwise the graph would keep wide matrices until backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(inputs, weight.to(inputs.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient.matmul(weight.to(gradient.dtype)), None


def install() -> None:
    """Replaces apex's extension by torch's products in linear layers that are built from now on."""
    import megatron.core.tensor_parallel.layers as layers

    module: Any = layers
    module.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_product)
    module._grad_accum_fusion_available = True
