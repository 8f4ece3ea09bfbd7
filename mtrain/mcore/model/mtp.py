"""Multi-token prediction: layers after the last one, each predicting a token further ahead.

Depth k joins the hidden states of depth k - 1 (of the model itself for k = 1) with the embedding of the token k ahead:
both are normalized, their concatenation is projected to the hidden size, and a transformer layer, a final norm and the
model's own output layer follow. Tokens and labels come with the batch, cut from whole rows, and the losses are terms of
the objective: megatron-core's own rolling, masking and dividing are not used.

Source: DeepSeek-V3 report (2024), section 2.2; megatron-core 0.16.1, transformer/multi_token_prediction.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import assert_never

from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
    get_mtp_layer_spec,
)
from torch import Tensor

from mtrain.config.schema.model import ModelSection
from mtrain.mcore.model.layer_parts import Backend, layer_spec
from mtrain.mcore.model.norm import Norm


class MultiTokenLayer(MultiTokenPredictionLayer):
    """One depth; it takes embeddings of the tokens ahead instead of rolling a rank's part of the row."""

    def forward(
        self,
        embeddings: Tensor,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None,
        padding_mask: Tensor | None,
    ) -> Tensor:
        """Computes the hidden states of this depth, under its final norm.

        Args:
            embeddings: [seq_local, batch, hidden] of the token k ahead of each position.
            hidden_states: [seq_local, batch, hidden] of the depth before, under its final norm.
            attention_mask: Mask that the model's layers get.
            rotary_pos_emb: Angles that the model's layers get: positions are those of the row, not of the tokens ahead.
            padding_mask: Sequence of each position for routers, [batch, seq_local of sequence parallelism] int64;
                negative where no token lies so far ahead.
        """
        given = (embeddings, hidden_states, attention_mask, rotary_pos_emb, padding_mask)
        if self.config.recompute_granularity == "full" and self.training:
            # by hand: this forward replaces megatron-core's, which would recompute
            output: Tensor = tensor_parallel.checkpoint(self._joined, False, *given)
        else:
            output = self._joined(*given)
        return output

    def _joined(
        self,
        embeddings: Tensor,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None,
        padding_mask: Tensor | None,
    ) -> Tensor:
        # as TransformerBlock does: under sp, ranks of TP hold other tokens and draw dropout from states of their own
        with tensor_parallel.get_cuda_rng_tracker().fork() if self.sequence_parallel else nullcontext():
            hidden_states, _ = self.transformer_layer(
                # [seq_local, batch, hidden]; all-gathers over TP the columns of eh_proj
                hidden_states=self._concat_embeddings(hidden_states, embeddings),
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                padding_mask=padding_mask,
            )
        output: Tensor = self._postprocess(hidden_states)
        return output


def depths_spec(model: ModelSection, backend: Backend) -> MultiTokenPredictionBlockSubmodules | None:
    """Builds the spec of all depths, whose layers are of the kind of the model's last one; None without depths.

    Args:
        model: Section of the architecture.
        backend: Backend of the layers, torch or te.
    """
    if model.mtp_depths == 0:
        return None
    match backend:
        case "te":
            layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_norm)
            submodules = get_mtp_layer_spec(layer, use_transformer_engine=True).submodules
        case "torch":
            submodules = MultiTokenPredictionLayerSubmodules(
                enorm=Norm,
                hnorm=Norm,
                eh_proj=ColumnParallelLinear,
                transformer_layer=layer_spec(model, model.num_layers - 1),
                layer_norm=Norm,
            )
        case _:
            assert_never(backend)
    depth = ModuleSpec(module=MultiTokenLayer, submodules=submodules)
    # one spec, but separate weights for each depth
    return MultiTokenPredictionBlockSubmodules(layer_specs=[depth] * model.mtp_depths)


def drop_unused_table(model: GPTModel) -> None:
    """Removes the output table of a last stage that takes its logits from the embeddings it holds for the depths.

    megatron-core allocates it, never uses it, and cannot name it in a checkpoint (language_module.py).
    """
    if model.mtp_process and model.share_embeddings_and_output_weights and not model.pre_process:
        model.output_layer.weight = None
