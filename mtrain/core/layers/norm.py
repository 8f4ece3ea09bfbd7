"""RMSNorm and LayerNorm for the torch spec, and layers with output norms, as in Gemma and OLMo-2.

megatron-core's wrapper around torch's norms refuses sequence parallelism (torch_norm.py); these norms have the
attribute `sequence_parallel`, by which gradients of their weights are summed over the tensor-parallel group.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mtrain.core.kernels import region
from mtrain.core.layers.own_parameters import device_of, replicated_parameter
from mtrain.core.layers.products import widened


class Norm(nn.Module):
    """Normalizes the last dimension according to `config.normalization`.

    Maps [..., size] to [..., size] in any float dtype; statistics are float32. With zero-centred weights, 1 + weight
    and the product are float32 as well, since in bfloat16 the sum would lose the last bits of the weight.
    """

    bias: nn.Parameter | None
    compiles_regions = False

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.epsilon = eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        initial = 0.0 if self.is_zero_centered else 1.0
        self.weight = replicated_parameter(config, torch.full((hidden_size,), initial))
        if config.normalization == "LayerNorm":
            self.bias = replicated_parameter(config, torch.zeros(hidden_size))
        else:
            self.register_parameter("bias", None)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalizes, scales and, for LayerNorm, shifts."""
        if self.bias is None:
            normalise = rms_normed.compiled_if(self.compiles_regions)
            return normalise(hidden, self.weight, self.epsilon, self.is_zero_centered)
        shift = layer_normed.compiled_if(self.compiles_regions)
        return shift(hidden, self.weight, self.bias, self.epsilon, self.is_zero_centered)


@region(activations=1)
def layer_normed(hidden: Tensor, weight: Tensor, bias: Tensor, epsilon: float, is_zero_centered: bool) -> Tensor:
    """Computes LayerNorm of the last dimension; see `Norm`."""
    if not is_zero_centered:
        return functional.layer_norm(hidden, weight.shape, weight, bias, epsilon)
    wide = widened(hidden)
    scale = 1.0 + weight.to(wide.dtype)
    return functional.layer_norm(wide, weight.shape, scale, bias.to(wide.dtype), epsilon).to(hidden.dtype)


@region(activations=1)
def rms_normed(hidden: Tensor, weight: Tensor, epsilon: float, is_zero_centered: bool) -> Tensor:
    """Computes RMSNorm of the last dimension; see `Norm`."""
    if is_zero_centered:
        wide = widened(hidden)
        return _rms_normed(wide, 1.0 + weight.to(wide.dtype), epsilon).to(hidden.dtype)
    return _rms_normed(hidden, weight, epsilon)


def _rms_normed(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    is_wide = hidden.dtype == weight.dtype and hidden.dtype.itemsize >= 4
    # torch's compiler fuses the formula itself
    if hidden.device.type == "cpu" and is_wide and not torch.compiler.is_compiling():
        return RmsNormOnCpu.apply(hidden, weight, epsilon)  # type: ignore[no-untyped-call]
    return functional.rms_norm(hidden, weight.shape, weight, epsilon)


class RmsNormOnCpu(torch.autograd.Function):
    """Maps (hidden [..., size], weight [size], epsilon) to [..., size], in float32 or float64.

    Autograd of the plain formula would make twice as many passes and save the normalized tokens.
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
        weight_gradient = products.sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, weight_gradient, None
        # inverse x (g w - y mean(g w y)), where y is the normalized token
        mean = torch.mv(products, weight).div_(-size).view(inverse.shape)
        return normalised.mul_(mean).addcmul_(gradient, weight).mul_(inverse), weight_gradient, None


OutputWithBias: TypeAlias = tuple[Tensor, Tensor | None]
"""Output of a sublayer, [seq, batch, hidden], and a bias, [hidden], that has not been added yet."""

AddToResidual: TypeAlias = Callable[[OutputWithBias, Tensor, float], Tensor]
"""Maps (output, residual, dropout probability) to the next residual."""

OUTPUT_NORM_NAMES = {
    "post_self_attn_layernorm.": "self_attention.linear_proj.post_layernorm.",
    "post_mlp_layernorm.": "mlp.linear_fc2.post_layernorm.",
}
"""Names in checkpoints, which follow Megatron-Bridge, where these norms belong to the projections before them."""


class OutputNormLayer(TransformerLayer):
    """Computes residual + norm(sublayer(x)) for attention and feed-forward; x is the residual or its norm."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        **options: Any,  # of newer versions
    ) -> None:
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection, vp_stage=vp_stage, **options)
        self.post_self_attn_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        # TransformerLayer calls these to add a sublayer to the residual
        self.self_attn_bda = _normalised(self.post_self_attn_layernorm)
        self.mlp_bda = _normalised(self.post_mlp_layernorm)


class ScaledLayer(OutputNormLayer):
    """Computes an `OutputNormLayer` times a number, which as in transformers is a buffer and not trained."""

    scalar: Tensor

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.register_buffer("scalar", torch.ones(1, dtype=config.params_dtype, device=device_of(config)))
        build = self.mlp_bda  # the last operation of the layer

        def build_scaled(training: bool, fused: bool) -> AddToResidual:
            add = build(training, fused)
            return lambda output, residual, probability: add(output, residual, probability) * self.scalar

        self.mlp_bda = build_scaled


def _normalised(norm: nn.Module) -> Callable[[bool, bool], AddToResidual]:
    """Wraps megatron-core's factory of functions that add bias and residual, and puts a norm between the two."""

    def build(training: bool, fused: bool) -> AddToResidual:
        add: AddToResidual = get_bias_dropout_add(training, fused)

        def normalise_and_add(output_with_bias: OutputWithBias, residual: Tensor, probability: float) -> Tensor:
            output, bias = output_with_bias
            # None, since the bias is added before the norm
            return add((norm(output if bias is None else output + bias), None), residual, probability)

        return normalise_and_add

    return build
