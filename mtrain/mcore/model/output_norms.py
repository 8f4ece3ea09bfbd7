"""A layer with a norm after attention and one after the feed-forward part, as in Gemma and OLMo-2."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from mtrain.mcore.model.norm import Norm

OutputWithBias: TypeAlias = tuple[Tensor, Tensor | None]
"""[seq, batch, hidden] output of a part of the layer, and the [hidden] bias that is still to be added."""

AddToResidual: TypeAlias = Callable[[OutputWithBias, Tensor, float], Tensor]
"""(output, residual, dropout probability) -> the next residual."""

CHECKPOINT_NAMES = {
    "post_self_attn_layernorm.": "self_attention.linear_proj.post_layernorm.",
    "post_mlp_layernorm.": "mlp.linear_fc2.post_layernorm.",
}
"""Names in checkpoints, which are Megatron-Bridge's: there these norms belong to the projections before them."""


class OutputNormLayer(TransformerLayer):
    """Computes residual + norm(attention(x)), with x the residual or its norm; likewise for the feed-forward part."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,  # depths of multi-token prediction get none
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection, vp_stage=vp_stage)
        self.post_self_attn_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        # TransformerLayer calls these where it adds a part to the residual: the only place between the two
        self.self_attn_bda = _normalised(self.post_self_attn_layernorm)
        self.mlp_bda = _normalised(self.post_mlp_layernorm)


def _normalised(norm: nn.Module) -> Callable[[bool, bool], AddToResidual]:
    """Wraps megatron-core's factory of functions that add bias and residual, with a norm between the two."""

    def build(training: bool, fused: bool) -> AddToResidual:
        add: AddToResidual = get_bias_dropout_add(training, fused)

        def normalise_and_add(output_with_bias: OutputWithBias, residual: Tensor, probability: float) -> Tensor:
            output, bias = output_with_bias
            # the bias is added before the norm, which is of the whole output; hence None for the one still to be added
            return add((norm(output if bias is None else output + bias), None), residual, probability)

        return normalise_and_add

    return build
