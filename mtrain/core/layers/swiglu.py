"""Activations of feed-forward parts, above all SwiGLU of a projection with adjacent gates and ups.

megatron-core adds its offset to the ups even if it is 0, and autograd concatenates the two gradients by another copy;
here both gradients are written directly to where the projection reads them.

Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mtrain.core.kernels import region


class Activation(NamedTuple):
    """Activation of a feed-forward part, from the fields of TransformerConfig."""

    function: Callable[[Tensor], Tensor]
    is_gated: bool
    limit: float | None
    """Bound of gates from above and of ups from both sides; None: unbounded."""
    offset: float
    """Number added to the ups."""

    @classmethod
    def of(cls, config: TransformerConfig) -> Self:
        """Returns the activation of a model."""
        limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
        return cls(config.activation_func, config.gated_linear_unit, limit, offset)

    @property
    def is_swiglu(self) -> bool:
        """Says whether `_SwiGlu` computes it."""
        return self.is_gated and self.function is functional.silu and self.limit is None and self.offset == 0


@region(activations=1)
def activated(projected: Tensor, activation: Activation) -> Tensor:
    """Applies an activation to a projection: [..., f] -> [..., f], or [..., 2 f] -> [..., f] if it is gated.

    The first half are gates, the second half are ups. SwiGLU gives the bits of the plain formula in every precision.
    """
    if activation.is_swiglu and not torch.compiler.is_compiling():
        return _SwiGlu.apply(projected)  # type: ignore[no-untyped-call]
    if not activation.is_gated:
        return activation.function(projected)
    gate, up = projected.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return activation.function(gate) * (up + activation.offset)


@region(activations=2)
def weighted_activated(projected: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    """Computes `activated` times a weight for each row, [rows, 1], in the precision of the projection."""
    weighted: Tensor = activated(projected, activation) * weights
    return weighted.to(projected.dtype)


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
    """megatron-core's feed-forward part with our activation; the state is the same."""

    compiles_regions = False

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the same as megatron-core's module."""
        activation = Activation.of(self.config)
        is_taken = activation.is_swiglu or self.compiles_regions
        if per_token_scale is not None or torch.compiler.is_compiling() or not is_taken:
            return super().forward(hidden_states, per_token_scale, **options)
        projected, bias = self.linear_fc1(hidden_states)
        projected = projected if bias is None else projected + bias
        output = self.linear_fc2(activated.compiled_if(self.compiles_regions)(projected, activation))
        return output


def use_own_swiglu(model: nn.Module) -> None:
    """Makes the dense feed-forward parts of a model use `activated`."""
    for module in model.modules():
        # changes the class, not the spec, since TransformerLayer passes groups only to a class called MLP
        if type(module) is MLP:
            module.__class__ = FeedForward
