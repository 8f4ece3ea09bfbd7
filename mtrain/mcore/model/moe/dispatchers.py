"""Sorts tokens by expert, and back, without asking the device for sizes that are known.

These replace megatron-core's dispatchers, which call masked_select twice per layer and pass, for whose size the host
waits (moe_utils.py::permute), though it follows from top_k; and which copy counts of tokens to the host, which nothing
needs where every rank holds all experts whole. Order and numbers are the same to the bit.
"""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import unpermute
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from torch import Tensor


def dispatcher_in_place_of(
    theirs: MoETokenDispatcher, config: TransformerConfig, groups: ProcessGroupCollection
) -> MoETokenDispatcher:
    """Returns a layer's dispatcher: megatron-core's own where sizes depend on values or all tokens are gathered.

    Args:
        theirs: Dispatcher that megatron-core made for this layer.
        config: Configuration of the model.
        groups: The process groups.
    """
    if config.moe_expert_capacity_factor is not None:  # some choices are dropped
        return theirs
    if groups.ep.size() == groups.expt_tp.size() == 1:
        return LocalDispatcher(config, groups)
    if isinstance(theirs, MoEAlltoAllTokenDispatcher):
        return AllToAllDispatcher(theirs.num_local_experts, theirs.local_expert_indices, config, groups)
    return theirs


class AllToAllDispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's dispatcher with another first sort. The host waits once per layer and pass, for ranks' sizes."""

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Does what `LocalDispatcher.dispatch_preprocess` does."""
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        # starts the copies of what each rank sends and receives; the exchange waits for them
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        tokens = hidden_states.reshape(-1, self.hidden_shape[-1])
        self.hidden_shape_before_permute = tokens.shape
        ordered, weights, token_of_row = _by_expert(tokens, routing_map, probs, self.config.moe_router_topk)
        self.reversed_local_input_permutation_mapping = token_of_row
        return ordered, weights


class LocalDispatcher(MoETokenDispatcher):
    """Dispatcher of one layer; like megatron-core's, it keeps what one part of the layer's pass finds for the next."""

    _shape: torch.Size
    _token_of_row: Tensor
    _counts: Tensor

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sorts tokens by expert.

        Args:
            hidden_states: [seq_local, batch, hidden].
            routing_map: Choices, [tokens, num_experts] bool, top_k of each token's true.
            probs: Weights, [tokens, num_experts].

        Returns:
                [tokens x top_k, hidden], each expert's in the order of the tokens; and the weight of each.
        """
        self._shape, self._counts = hidden_states.shape, routing_map.sum(0)
        tokens = hidden_states.reshape(-1, self._shape[-1])
        ordered, weights, self._token_of_row = _by_expert(tokens, routing_map, probs, self.config.moe_router_topk)
        return ordered, weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tokens, which are on the right rank already."""
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tokens with the number of each expert's: [num_experts] int64, on the device."""
        return hidden_states, self._counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Returns the outputs, which are in the order in which the tokens came."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Returns the outputs, which are on the right rank already."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Adds up each token's outputs: [tokens x top_k, hidden] -> [seq_local, batch, hidden]."""
        tokens = torch.Size((self._shape[:-1].numel(), self._shape[-1]))
        combined: Tensor = unpermute(hidden_states, self._token_of_row, restore_shape=tokens)
        return combined.view(self._shape)


def _by_expert(tokens: Tensor, chosen: Tensor, weights: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens and weights in the order of `rows_by_expert`, and the token of each row."""
    rows = rows_by_expert(chosen, top_k)
    token_of_row = rows % len(chosen)
    return tokens.index_select(0, token_of_row), weights.T.reshape(-1).index_select(0, rows), token_of_row


def rows_by_expert(chosen: Tensor, top_k: int) -> Tensor:
    """Returns [tokens x top_k] int64: expert x tokens + token of every choice, ascending. The host does not wait.

    Args:
        chosen: [tokens, num_experts] bool.
        top_k: Number of true values in every row.
    """
    flat = chosen.T.reshape(-1)
    count = chosen.shape[0] * top_k
    # moves each choice to the place of its number; all others to one place more, which is cut off
    places = torch.where(flat, flat.cumsum(0) - 1, count)
    rows = torch.empty(count + 1, dtype=torch.int64, device=chosen.device)
    return rows.scatter_(0, places, torch.arange(len(flat), device=chosen.device))[:count]
