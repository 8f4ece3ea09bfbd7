"""RMSNorm and LayerNorm for the torch spec.

megatron-core's own wrapper around the torch norms refuses sequence parallelism (torch_norm.py); these carry the
`sequence_parallel` mark by which gradients of norm weights are summed over the tensor-parallel group.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class Norm(nn.Module):
    """Normalizes the last dimension as `config.normalization` says.

    Shapes: [..., size] -> [..., size], any float dtype; statistics are taken in float32 by torch. Where weights are
    centred on zero, 1 + weight and the product are float32 too: in bfloat16 the sum would lose the weight's last bits.
    """

    bias: nn.Parameter | None

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.size = (hidden_size,)
        self.epsilon = eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        initial = 0.0 if self.is_zero_centered else 1.0
        self.weight = self._parameter(torch.full(self.size, initial, dtype=config.params_dtype), config)
        if config.normalization == "LayerNorm":
            self.bias = self._parameter(torch.zeros(hidden_size, dtype=config.params_dtype), config)
        else:
            self.register_parameter("bias", None)
        self.is_layer_norm = config.normalization == "LayerNorm"

    @staticmethod
    def _parameter(value: Tensor, config: TransformerConfig) -> nn.Parameter:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        parameter = nn.Parameter(value.to(device))
        # under sp each rank of TP sees its own tokens: finalize_model_grads sums gradients with this mark
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalizes, scales and, for LayerNorm, shifts."""
        if self.is_zero_centered:
            wide = torch.promote_types(hidden.dtype, torch.float32)
            bias = None if self.bias is None else self.bias.to(wide)
            return self._normalised(hidden.to(wide), 1.0 + self.weight.to(wide), bias).to(hidden.dtype)
        return self._normalised(hidden, self.weight, self.bias)

    def _normalised(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_layer_norm:
            return functional.layer_norm(hidden, self.size, weight, bias, self.epsilon)
        is_wide = hidden.dtype == weight.dtype and hidden.dtype.itemsize >= 4
        # a compiler fuses torch's own formula itself
        if hidden.device.type == "cpu" and is_wide and not torch.compiler.is_compiling():
            normalised: Tensor = RmsNormOnCpu.apply(hidden, weight, self.epsilon)  # type: ignore[no-untyped-call]
            return normalised
        return functional.rms_norm(hidden, self.size, weight, self.epsilon)


class RmsNormOnCpu(torch.autograd.Function):
    """Maps (hidden [..., size], weight [size], epsilon) to [..., size], in float32 or float64.

    Torch has no single kernel for it on CPUs: autograd of the formula makes twice the passes over the tokens and keeps
    the normalized ones.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        size = hidden.shape[-1]
        # [..., 1]
        inverse = torch.linalg.vecdot(hidden, hidden).div_(size).add_(epsilon).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(hidden, weight, inverse)
        return (hidden * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, inverse = ctx.saved_tensors
        size = hidden.shape[-1]
        normalised = hidden * inverse
        products = (gradient * normalised).reshape(-1, size)
        of_weight = products.sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        # inverse x (g w - y mean(g w y)), where y is the normalized token
        mean = torch.mv(products, weight).div_(-size).view(inverse.shape)
        return normalised.mul_(mean).addcmul_(gradient, weight).mul_(inverse), of_weight, None
