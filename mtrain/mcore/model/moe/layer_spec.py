"""The feed-forward part of a layer with experts, and its fields in megatron-core's configuration."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.model import ModelSection
from mtrain.mcore.model.moe.experts import Experts
from mtrain.mcore.model.moe.layer import ExpertsLayer
from mtrain.mcore.model.moe.router import Router


def experts_spec(section: ExpertsSection) -> ModuleSpec:
    """Returns megatron-core's layer and dispatcher with our router and experts."""
    shared = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=ExpertsLayer,
        submodules=MoESubmodules(
            router=partial(Router, section=section),
            experts=ModuleSpec(module=Experts, params={"implementation": section.implementation}),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared),
        ),
    )


def experts_fields(model: ModelSection) -> dict[str, Any]:
    """Returns the fields of TransformerConfig; none where the model has no experts.

    megatron-core's balancing is not used: its losses and its update of the bias stay off.
    """
    section = model.experts
    if section is None:
        return {}
    pattern = [int(section.has_experts(layer)) for layer in range(model.num_layers)]
    return {
        "num_moe_experts": section.num_experts,
        "moe_ffn_hidden_size": section.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": section.shared_ffn_hidden_size or None,
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
