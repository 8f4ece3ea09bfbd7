"""Multi-token prediction (MTP): layers after the last one, each of which predicts one token further ahead.

Depth k combines the hidden states of depth k - 1 (of the model itself for k = 1) with the embedding of the token k
ahead: both are normalized, their concatenation is projected to the hidden size, and a transformer layer, a final norm
and the output layer of the model follow. Tokens and labels come with the batch, and losses are terms of the objective,
so megatron-core's rolling, masking and dividing are not used. Names in checkpoints are megatron-core's.

Source: DeepSeek-V3 report (2024), section 2.2.
"""

from contextlib import nullcontext
from typing import Any, assert_never

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from mtrain.config.schema.model import ModelSection
from mtrain.core.layers.layer_parts import Backend, layer_spec
from mtrain.core.layers.layer_spec import transformer_engine_layer
from mtrain.core.layers.norm import Norm
from mtrain.core.layers.own_parameters import ShardedOffsets


class Depth(MegatronModule):
    """One MTP depth: two norms, a projection, a transformer layer and a final norm."""

    def __init__(
        self,
        model: ModelSection,
        config: TransformerConfig,
        backend: Backend,
        groups: ProcessGroupCollection,
        position: tuple[int, int | None],
    ) -> None:
        """Makes a depth; `position` has the layer number as TransformerLayer expects it, and the virtual stage."""
        super().__init__(config=config)
        norm, projection, layer = _modules(model, backend)
        number, vp_stage = position
        self._tp = groups.tp
        self.enorm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.hnorm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.eh_proj = projection(
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=groups.tp,
        )
        self.transformer_layer = build_module(
            layer, config=config, layer_number=number, pg_collection=groups, vp_stage=vp_stage
        )
        self.final_layernorm = norm(config, config.hidden_size, config.layernorm_epsilon)

    @property
    def mtp_model_layer(self) -> nn.Module:
        """The layer under the name that megatron-core's schedules use from 0.17 on."""
        return self.transformer_layer

    def forward(
        self,
        embeddings: Tensor,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None,
        padding_mask: Tensor | None,
    ) -> Tensor:
        """Computes the normalized hidden states of this depth from those of the depth before.

        Args:
            embeddings: Embedding of the token k ahead of each position, [seq_local, batch, hidden].
            hidden_states: Hidden states of the depth before, [seq_local, batch, hidden].
            attention_mask: Document starts, see `key_set`.
            rotary_pos_emb: Angles of the positions.
            padding_mask: Marks for routers, negative for positions without a token that far ahead.
        """

        def computed(embeddings: Tensor, hidden_states: Tensor) -> Tensor:
            # like TransformerBlock: under sp, TP ranks hold different tokens and draw different dropout
            is_divided = self.config.sequence_parallel
            with tensor_parallel.get_cuda_rng_tracker().fork() if is_divided else nullcontext():
                output, _ = self.transformer_layer(
                    hidden_states=self._joined(embeddings, hidden_states),
                    attention_mask=attention_mask,
                    rotary_pos_emb=rotary_pos_emb,
                    padding_mask=padding_mask,
                )
            return self.final_layernorm(output)

        if self.config.recompute_granularity == "full" and self.training:
            return tensor_parallel.checkpoint(computed, False, embeddings, hidden_states)
        return computed(embeddings, hidden_states)

    def _joined(self, embeddings: Tensor, hidden_states: Tensor) -> Tensor:
        """Combines both inputs to [seq_local, batch, hidden]; one all-gather over TP of the projection's columns."""
        both = torch.cat((self.enorm(embeddings), self.hnorm(hidden_states)), dim=-1)
        columns, _ = self.eh_proj(both)
        joined: Tensor = gather_from_tensor_model_parallel_region(columns, group=self._tp)
        return scatter_to_sequence_parallel_region(joined, group=self._tp) if self.config.sequence_parallel else joined


class Depths(MegatronModule):
    """All MTP depths of a model, each with weights of its own, on the last stage."""

    def __init__(
        self,
        model: ModelSection,
        config: TransformerConfig,
        backend: Backend,
        groups: ProcessGroupCollection,
        vp_stage: int | None,
    ) -> None:
        super().__init__(config=config)
        # TransformerLayer adds the number of layers on earlier stages
        first = config.num_layers + 1 - get_transformer_layer_offset(config, vp_stage)
        numbered = enumerate(model.layers_ahead, start=first)
        self.layers = nn.ModuleList(Depth(model, config, backend, groups, (number, vp_stage)) for number, _ in numbered)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: ShardedOffsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describes the parameters of all depths, each under its number, for checkpoints."""
        tensors: dict[str, Any] = {}
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Depth)
            tensors |= layer.sharded_state_dict(f"{prefix}layers.{number}.", (), metadata)
        return tensors


def _modules(model: ModelSection, backend: Backend) -> tuple[Any, Any, ModuleSpec]:
    """Returns the classes of norms and projection, and the spec of the layer, which is like the model's last layer."""
    match backend:
        case "te":
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

            return TENorm, TEColumnParallelLinear, transformer_engine_layer(model, model.num_layers - 1)
        case "torch" | "fla":
            return Norm, ColumnParallelLinear, layer_spec(model, model.num_layers - 1)
        case _:
            assert_never(backend)
