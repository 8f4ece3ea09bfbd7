"""Weight gradients that matrix products add to their float32 buffer, without a pass of their own.

megatron-core calls apex's extension for it (`gradient_accumulation_fusion`). torch has the same products: in float32
everywhere, and on GPUs of half-precision factors into float32, so that a microbatch's gradient is never rounded. Other
devices compute the product and add it, as without fusion.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

FIELD = "gradient_accumulation_fusion"
"""Field of `model.megatron` that turns fusion on."""


def install() -> None:
    """Replaces apex's extension by torch's products, for linear layers that are built from now on."""
    import megatron.core.tensor_parallel.layers as layers

    module: Any = layers
    module.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_product)
    module._grad_accum_fusion_available = True


@torch.no_grad()
def add_product(inputs: Tensor, output_gradients: Tensor, total: Tensor) -> None:
    """Adds the gradient of a weight to its total.

    Args:
        inputs: Input of the layer, [tokens, in].
        output_gradients: Gradient of the output, [tokens, out], of the same dtype.
        total: Sum [out, in] float32; changed in place.
    """
    if inputs.dtype == torch.float32:
        total.addmm_(output_gradients.t(), inputs)
    elif inputs.device.type == "cuda":
        torch.addmm(total, output_gradients.t(), inputs, out_dtype=torch.float32, out=total)
    else:
        total.add_(output_gradients.t() @ inputs)
