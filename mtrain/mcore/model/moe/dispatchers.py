"""Tokens sorted by expert, and back, without asking the device for sizes that are known.

In the place of megatron-core's dispatchers. These call masked_select twice a layer and pass, whose size the host waits
for (moe_utils.py::permute), though it follows from top_k; and bring counts of tokens to the host, which none needs
where every rank holds all experts whole. Order and numbers are the same to the bit.
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
    """What a layer sends its tokens with: megatron-core's own where sizes depend on values or all tokens are gathered.

    Args:
        theirs: Made for this layer.
        config: Of the model.
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
    """megatron-core's, but for the first sort. The host waits for what each rank sends, once a layer and pass."""

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """As `LocalDispatcher.dispatch_preprocess`."""
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        # Starts the copies of what each rank sends and receives; they are waited for in front of the exchange.
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        tokens = hidden_states.reshape(-1, self.hidden_shape[-1])
        self.hidden_shape_before_permute = tokens.shape
        ordered, weights, token_of_row = _by_expert(tokens, routing_map, probs, self.config.moe_router_topk)
        self.reversed_local_input_permutation_mapping = token_of_row
        return ordered, weights


class LocalDispatcher(MoETokenDispatcher):
    """Of one layer. As in megatron-core's, what one part of the layer's pass finds is kept for the next."""

    _shape: torch.Size
    _token_of_row: Tensor
    _counts: Tensor

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sorts by expert.

        Args:
            hidden_states: [seq_local, batch, hidden].
            routing_map: [tokens, num_experts] bool, top_k of each token's true.
            probs: [tokens, num_experts]: weights.

        Returns:
            [tokens x top_k, hidden], of an expert in the order of the tokens; and the weight of each.
        """
        self._shape, self._counts = hidden_states.shape, routing_map.sum(0)
        tokens = hidden_states.reshape(-1, self._shape[-1])
        ordered, weights, self._token_of_row = _by_expert(tokens, routing_map, probs, self.config.moe_router_topk)
        return ordered, weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """They are there."""
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With how many each expert has: [num_experts] int64, on the device."""
        return hidden_states, self._counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """They are in the order in which they came."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """They are where they belong."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[tokens x top_k, hidden] -> [seq_local, batch, hidden]: each token's outputs added up."""
        tokens = torch.Size((self._shape[:-1].numel(), self._shape[-1]))
        combined: Tensor = unpermute(hidden_states, self._token_of_row, restore_shape=tokens)
        return combined.view(self._shape)


def _by_expert(tokens: Tensor, chosen: Tensor, weights: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and weights in the order of `rows_by_expert`, and which token each row is."""
    rows = rows_by_expert(chosen, top_k)
    token_of_row = rows % len(chosen)
    return tokens.index_select(0, token_of_row), weights.T.reshape(-1).index_select(0, rows), token_of_row


def rows_by_expert(chosen: Tensor, top_k: int) -> Tensor:
    """[tokens x top_k] int64: expert x tokens + token of every choice, increasing. The host does not wait.

    Args:
        chosen: [tokens, num_experts] bool.
        top_k: How many are true in every row.
    """
    flat = chosen.T.reshape(-1)
    count = chosen.shape[0] * top_k
    # each choice to the place of its number; what is not chosen to one place more, which is cut off
    places = torch.where(flat, flat.cumsum(0) - 1, count)
    rows = torch.empty(count + 1, dtype=torch.int64, device=chosen.device)
    return rows.scatter_(0, places, torch.arange(len(flat), device=chosen.device))[:count]
