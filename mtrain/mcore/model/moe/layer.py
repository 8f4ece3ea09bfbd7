"""The layer of experts: megatron-core's parts, and the sequence of each position on its way to the router."""

from __future__ import annotations

from functools import partial, partialmethod
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.model import ModelSection
from mtrain.mcore.model.moe.dispatchers import dispatcher_in_place_of
from mtrain.mcore.model.moe.experts import Experts
from mtrain.mcore.model.moe.router import Router


class SharedExperts(SharedExpertMLP):
    """Shared experts whose input has one gradient, also where a gate reads it as well: recomputed or not, it is added
    up in one order, to the bit."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns [seq_local, batch, hidden]; takes the same."""
        output: Tensor = super().forward(hidden_states.view_as(hidden_states))
        return output


class ExpertsLayer(MoELayer):
    """MoELayer whose router receives the sequence of each position.

    megatron-core passes a padding mask along, which MoELayer makes bool; a balance by sequence needs numbers.
    """

    token_dispatcher: MoETokenDispatcher

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            config: Configuration of the model.
            submodules: Specs of router, experts, shared experts.
            layer_number: Global number of the layer, from 1.
            pg_collection: The process groups; None for megatron-core's own.
            options: Further arguments of megatron-core's newer versions.
        """
        super().__init__(config, submodules, layer_number, pg_collection, **options)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.token_dispatcher = dispatcher_in_place_of(self.token_dispatcher, config, groups)

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Routes the tokens of this rank, sends them to their experts and brings them back.

        Args:
            hidden_states: [seq_local, batch, hidden].
            intermediate_tensors: Part of megatron-core's protocol, for CUDA graphs of a part of the layer.
            padding_mask: Sequence of each position, [batch, seq_local] int64, in the place of megatron-core's mask;
                negative where there is no text. None where nothing is counted. With experts to take, [batch, seq_local,
                marks] of `router_marks`.

        Returns:
            [seq_local, batch, hidden]; and no bias.
        """
        assert intermediate_tensors is None
        marks = None if padding_mask is None else padding_mask.transpose(0, 1)
        if self.moe_layer_recompute and self.training:
            output: Tensor = tensor_parallel.checkpoint(self._routed, False, hidden_states, marks)
        else:
            output = self._routed(hidden_states, marks)
        return output, None

    def _routed(self, hidden_states: Tensor, marks: Tensor | None) -> Tensor:
        shared = self.shared_experts_compute(hidden_states)
        weights, chosen = self.route(hidden_states, marks)
        dispatched, weights = self.dispatch(*self.preprocess(hidden_states, weights, chosen))
        output, _ = self.routed_experts_compute(dispatched, weights)
        combined: Tensor = self.postprocess(self.combine(output), shared)
        return combined


def experts_spec(section: ExpertsSection) -> type[ExpertsLayer]:
    """Returns megatron-core's layer and dispatcher with our router and experts.

    It is a class, since megatron-core 0.16.1 warns of each ModuleSpec whose class is not one of its own.
    """
    module, shared = Experts, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if section.implementation == "te":
        from mtrain.mcore.model.moe import te_experts  # there where TransformerEngine is

        module, shared = te_experts.TransformerEngineExperts, te_experts.SHARED_EXPERTS
    submodules = MoESubmodules(
        router=partial(Router, section=section),
        experts=ModuleSpec(module=module, params={"implementation": section.implementation}),
        shared_experts=ModuleSpec(module=SharedExperts, submodules=shared),
    )
    build = partialmethod(ExpertsLayer.__init__, submodules=submodules)
    return type(ExpertsLayer.__name__, (ExpertsLayer,), {"__init__": build})


def experts_fields(model: ModelSection) -> dict[str, Any]:
    """Returns the fields of TransformerConfig; none where the model has no experts.

    megatron-core's balancing is not used: its losses and its update of the bias stay off.
    """
    section = model.experts
    if section is None:
        return {}
    pattern = [int(model.has_experts(layer)) for layer in range(model.num_layers)]
    return {
        "num_moe_experts": section.num_experts,
        "moe_ffn_hidden_size": section.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": section.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": section.shared_gate,
        # with a list, checkpoint keys carry the number of the layer
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_router_topk": section.top_k,
        "moe_router_score_function": section.score,
        "moe_router_pre_softmax": section.pre_softmax,
        "moe_router_num_groups": section.num_groups,
        "moe_router_group_topk": section.group_top_k,
        "moe_router_topk_scaling_factor": section.scaling_factor,
        "moe_router_dtype": "fp32",  # our router does so anyway; unset, TransformerConfig warns from 32 experts on
        "moe_router_load_balancing_type": "none",
        # replaced by terms of the objective: see mtrain/mcore/engine/router_balance.py
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": section.dispatcher,
        "moe_expert_capacity_factor": section.capacity_factor,
    }
