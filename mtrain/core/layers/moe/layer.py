"""The layer of experts: megatron-core's layer, with our dispatchers and the sequence of each position for the router.

Our dispatchers sort tokens by expert, and back, with the same results to the bit. megatron-core's dispatchers call
masked_select twice per layer and pass, where the host waits for a size (moe_utils.py::permute) that follows from top_k,
and copy token counts to the host even if every rank holds all experts whole. With a capacity, every expert gets as many
rows from a rank as it may take, so sizes follow from the configuration.
"""

from functools import partial, partialmethod
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_capacity, unpermute
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from torch import Tensor
from torch.nn import functional

from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.model import ModelSection
from mtrain.core.layers.moe.experts import Experts
from mtrain.core.layers.moe.router import Router
from mtrain.core.layers.norm import Norm


def dispatcher_in_place_of(
    theirs: MoETokenDispatcher, config: TransformerConfig, groups: ProcessGroupCollection
) -> MoETokenDispatcher:
    """Returns a layer's dispatcher: megatron-core's only if ranks gather all tokens."""
    is_local = groups.ep.size() == groups.expt_tp.size() == 1
    if not is_local and not isinstance(theirs, MoEAlltoAllTokenDispatcher):
        return theirs
    if config.moe_expert_capacity_factor is not None:
        return CapacityDispatcher(config, groups)
    if is_local:
        return LocalDispatcher(config, groups)
    return AllToAllDispatcher(theirs.num_local_experts, theirs.local_expert_indices, config, groups)


class AllToAllDispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's dispatcher with our first sort; the host waits once per layer and pass, for sizes."""

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sorts tokens by expert like `LocalDispatcher.dispatch_preprocess`."""
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        # starts to copy the numbers of tokens that ranks send and receive; the exchange waits for them
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        tokens = hidden_states.reshape(-1, self.hidden_shape[-1])
        self.hidden_shape_before_permute = tokens.shape
        ordered, weights, token_of_row = by_expert(tokens, routing_map, probs, self.config.moe_router_topk)
        self.reversed_local_input_permutation_mapping = token_of_row
        return ordered, weights


class LocalDispatcher(MoETokenDispatcher):
    """Dispatcher for a rank with all experts; like megatron-core's, it keeps state between the parts of a pass."""

    _shape: torch.Size
    _token_of_row: Tensor
    _counts: Tensor

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sorts tokens, [seq_local, batch, hidden], by expert; choices and weights are [tokens, num_experts].

        Returns:
            Tokens ordered by expert, then by position, [tokens x top_k, hidden], and their weights.
        """
        self._counts = routing_map.sum(0)
        return self._sorted(hidden_states, routing_map, probs)

    def _sorted(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor, capacity: int | None = None
    ) -> tuple[Tensor, Tensor]:
        self._shape = hidden_states.shape
        tokens = hidden_states.reshape(-1, self._shape[-1])
        top_k = self.config.moe_router_topk
        ordered, weights, self._token_of_row = by_expert(tokens, routing_map, probs, top_k, capacity)
        return ordered, weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tokens unchanged, since this rank has all experts."""
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tokens, their numbers by expert, [num_experts] int64 on the device, and the weights."""
        return hidden_states, self._counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Returns the outputs unchanged."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Returns the outputs unchanged."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums the outputs of each token, [rows, hidden], to [seq_local, batch, hidden]."""
        tokens = torch.Size((self._shape[:-1].numel(), self._shape[-1]))
        combined: Tensor = unpermute(hidden_states, self._token_of_row, restore_shape=tokens)
        return combined.view(self._shape)


class CapacityDispatcher(LocalDispatcher):
    """Dispatcher for experts on any ranks with a capacity: every rank sends as many rows to every expert.

    Two all-to-alls over ep, of tokens and of weights, and one back; over etp two all-gathers and a reduce-scatter.
    """

    _capacity: int

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sorts tokens by expert like `LocalDispatcher.dispatch_preprocess`, with zeros after the tokens of each
        expert: [num_experts x capacity, hidden]."""
        (num_tokens, num_experts), factor = routing_map.shape, self.config.moe_expert_capacity_factor
        assert factor is not None
        limit = get_capacity(num_tokens * self.config.moe_router_topk, num_experts, factor)
        self._capacity = min(num_tokens, limit)
        return self._sorted(hidden_states, routing_map, probs, self._capacity)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sends the rows of each expert to its rank; returns those for this rank's experts, ordered by sender."""
        return all_to_all(self.ep_group, hidden_states), all_to_all(self.ep_group, probs)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the rows of all senders, ordered by expert, their numbers by expert, [local experts] int64 on the
        host, and the weights."""
        # what each rank of etp has received, since each has a part of every expert
        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self.tp_group)
        probs = gather_from_sequence_parallel_region(probs, group=self.tp_group)
        num_senders = self.tp_size * self.ep_size
        num_experts = len(probs) // (num_senders * self._capacity)
        # in pinned memory, whose copy to the device the host need not await
        counts = torch.full((num_experts,), num_senders * self._capacity, pin_memory=probs.is_cuda)
        sizes = (num_senders, num_experts, self._capacity)
        return _transposed(hidden_states, sizes), counts, _transposed(probs, sizes)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Orders the outputs by sender, and sums those of etp, in at least float32."""
        num_senders = self.tp_size * self.ep_size
        sizes = (len(hidden_states) // (num_senders * self._capacity), num_senders, self._capacity)
        by_sender = _transposed(hidden_states, sizes)
        if self.tp_size == 1:
            return by_sender
        wide = by_sender.to(torch.promote_types(by_sender.dtype, torch.float32))
        return reduce_scatter_to_sequence_parallel_region(wide, group=self.tp_group).to(hidden_states.dtype)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Sends the outputs back; returns those of this rank's rows, ordered by expert."""
        return all_to_all(self.ep_group, hidden_states)


def _transposed(rows: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    """Reorders rows, [a x b x c, ...] for sizes (a, b, c), to [b x a x c, ...]."""
    return rows.view(*sizes, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def by_expert(
    tokens: Tensor, chosen: Tensor, weights: Tensor, top_k: int, capacity: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens and weights in the order of `rows_by_expert`, and the index of the token of each row."""
    rows, weights = rows_by_expert(chosen, top_k, capacity), weights.T.reshape(-1)
    if capacity is None:
        token_of_row = rows % len(chosen)
        return tokens.index_select(0, token_of_row), weights.index_select(0, rows), token_of_row
    is_empty = rows == chosen.numel()
    # different tokens, as kernels that add to one row would wait for each other
    token_of_row = torch.where(is_empty, torch.arange(len(rows), device=rows.device), rows) % len(chosen)
    ordered = tokens.index_select(0, token_of_row).masked_fill_(is_empty.unsqueeze(1), 0)
    return ordered, functional.pad(weights, (0, 1)).index_select(0, rows), token_of_row


def rows_by_expert(chosen: Tensor, top_k: int, capacity: int | None = None) -> Tensor:
    """Returns expert x number of tokens + token for every choice, ascending, [tokens x top_k] int64, without making the
    host wait. In `chosen`, [tokens, num_experts] bool, top_k elements of every row must be true.

    With a capacity, at most that many elements of every column may be true, and the result is [num_experts x capacity]:
    the rows of an expert with fewer tokens end with num_experts x tokens.
    """
    num_tokens, num_experts = chosen.shape
    columns = chosen.T
    if capacity is None:
        count, positions = num_tokens * top_k, columns.reshape(-1).cumsum(0) - 1
    else:
        first = capacity * torch.arange(num_experts, device=chosen.device)
        count, positions = num_experts * capacity, (first.unsqueeze(1) + columns.cumsum(1) - 1).reshape(-1)
    # scatters each choice to its rank among the choices, and all other elements to one more position, which is cut off
    positions = torch.where(columns.reshape(-1), positions, count)
    rows = torch.full((count + 1,), chosen.numel(), device=chosen.device)
    return rows.scatter_(0, positions, torch.arange(chosen.numel(), device=chosen.device))[:count]


class SharedExperts(SharedExpertMLP):
    """Shared experts that read their input through one view, so that its gradient, even with a gate, is summed in the
    same order with and without recomputation."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps [seq_local, batch, hidden] to the same shape."""
        return super().forward(hidden_states.view_as(hidden_states))


class ExpertsLayer(MoELayer):
    """MoELayer that passes the sequence of each position to its router, for balancing by sequence.

    The numbers come as megatron-core's padding mask, which MoELayer would convert to bool.
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
        super().__init__(config, submodules, layer_number, pg_collection, **options)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.token_dispatcher = dispatcher_in_place_of(self.token_dispatcher, config, groups)

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Routes the tokens of this rank, [seq_local, batch, hidden], to their experts, and returns their outputs and
        no bias.

        `padding_mask` has the marks of each position for `Router.forward`, with the batch axis first.
        """
        assert intermediate_tensors is None
        marks = None if padding_mask is None else padding_mask.transpose(0, 1)
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(self._routed, False, hidden_states, marks), None
        return self._routed(hidden_states, marks), None

    def _routed(self, hidden_states: Tensor, marks: Tensor | None) -> Tensor:
        shared = self.shared_experts_compute(hidden_states)
        weights, chosen = self.route(hidden_states, marks)
        dispatched, weights = self.dispatch(*self.preprocess(hidden_states, weights, chosen))
        output, _ = self.routed_experts_compute(dispatched, weights)
        return self.postprocess(self.combine(output), shared)


class BranchedExpertsLayer(ExpertsLayer):
    """Computes norm(shared(norm(x))) + norm(chosen(norm(x))) for the residual stream x, which is the router's input.

    Source: transformers 5.24, models/gemma4/modeling_gemma4.py, `Gemma4TextDecoderLayer`.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        for name in ("shared_input_norm", "shared_output_norm", "routed_input_norm", "routed_output_norm"):
            self.add_module(name, Norm(config, config.hidden_size, config.layernorm_epsilon))

    def _routed(self, hidden_states: Tensor, marks: Tensor | None) -> Tensor:
        # through one view, so that the gradients of its three readers are summed in the same order in recomputation
        hidden_states = hidden_states.view_as(hidden_states)
        shared = self.shared_output_norm(self.shared_experts_compute(self.shared_input_norm(hidden_states)))
        weights, chosen = self.route(hidden_states, marks)
        inner = self.routed_input_norm(hidden_states)
        dispatched, weights = self.dispatch(*self.preprocess(inner, weights, chosen))
        output, _ = self.routed_experts_compute(dispatched, weights)
        return self.routed_output_norm(self.postprocess(self.combine(output), None)) + shared


def experts_spec(section: ExpertsSection) -> type[ExpertsLayer]:
    """Returns the layer class with our router and experts as submodules.

    A class instead of a ModuleSpec, since megatron-core 0.16.1 warns about ModuleSpecs of foreign classes.
    """
    module, shared = Experts, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if section.implementation == "te":
        from mtrain.core.layers import transformer_engine  # here, since TransformerEngine may be missing

        module, shared = transformer_engine.TransformerEngineExperts, transformer_engine.SHARED_EXPERTS
    submodules = MoESubmodules(
        router=partial(Router, section=section),
        experts=ModuleSpec(module=module, params={"implementation": section.implementation}),
        shared_experts=ModuleSpec(module=SharedExperts, submodules=shared),
    )
    layer = BranchedExpertsLayer if section.branch_norms else ExpertsLayer
    build = partialmethod(layer.__init__, submodules=submodules)
    return type(layer.__name__, (layer,), {"__init__": build})


def experts_fields(model: ModelSection) -> dict[str, Any]:
    """Returns the fields of TransformerConfig for a model with experts; empty for one without.

    megatron-core's balancing losses and its update of biases stay off.
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
        # with a list, checkpoint keys contain the number of the layer
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_router_topk": section.top_k,
        "moe_router_score_function": section.score,
        "moe_router_pre_softmax": section.pre_softmax,
        "moe_router_num_groups": section.num_groups,
        "moe_router_group_topk": section.group_top_k,
        "moe_router_topk_scaling_factor": section.scaling_factor,
        "moe_router_dtype": "fp32",  # like our router; if unset, TransformerConfig warns from 32 experts on
        "moe_router_load_balancing_type": "none",
        # replaced by terms of the objective: see mtrain/core/engine/router_balance.py
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": section.dispatcher,
        "moe_expert_capacity_factor": section.capacity_factor,
    }
