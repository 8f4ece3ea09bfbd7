"""SwiGLU of a projection with adjacent gates and ups.

megatron-core adds its offset of the ups even if it is 0, and autograd joins the two gradients in a further copy: here
the gradient is written where the projection reads it.

Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


def swiglu(projected: Tensor) -> Tensor:
    """Computes silu(first half) x second half: [..., 2 f] -> [..., f], in every precision the formula's bits."""
    return _SwiGlu.apply(projected)  # type: ignore[no-untyped-call]


def is_swiglu(config: TransformerConfig) -> bool:
    """Says whether feed-forward parts of a model compute `swiglu`; a compiler fuses the formula itself."""
    is_plain = config.glu_linear_offset == 0 and config.activation_func_clamp_value is None
    is_gated = config.gated_linear_unit and config.activation_func is functional.silu
    return is_gated and is_plain and not torch.compiler.is_compiling()


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor) -> Tensor:
        gate, up = projected.chunk(2, dim=-1)
        activated = functional.silu(gate)
        ctx.save_for_backward(projected, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        projected, activated = ctx.saved_tensors
        gate, up = projected.chunk(2, dim=-1)
        of_projected = torch.empty_like(projected)
        of_gate, of_up = of_projected.chunk(2, dim=-1)
        torch.mul(gradient, activated, out=of_up)
        torch.mul(gradient, up, out=of_gate)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_projected


class FeedForward(MLP):
    """megatron-core's feed-forward part, with the same state."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Computes what megatron-core's module does."""
        if per_token_scale is not None or not is_swiglu(self.config):
            return super().forward(hidden_states, per_token_scale, **options)
        projected, bias = self.linear_fc1(hidden_states)
        output = self.linear_fc2(swiglu(projected if bias is None else projected + bias))
        return output


def use_own_swiglu(model: nn.Module) -> None:
    """Makes the dense feed-forward parts of a model use `swiglu`."""
    for module in model.modules():
        # the class changes and not the spec: TransformerLayer passes groups only to what is called MLP
        if type(module) is MLP:
            module.__class__ = FeedForward
