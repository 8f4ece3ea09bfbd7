"""Tokens sorted by expert, and back, where every rank holds all experts whole: nothing travels.

In the place of megatron-core's dispatchers, which ask the device for sizes on the way: masked_select in
moe_utils.py::permute twice a layer and pass, and counts of tokens that they bring to the host. Here all sizes follow
from top_k, so the host runs ahead of the device. Order and numbers are the same to the bit.
"""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import unpermute
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor


def serves(config: TransformerConfig, groups: ProcessGroupCollection) -> bool:
    """Whether tokens stay where they are, each with its top_k choices."""
    # with a capacity some choices are dropped, so that sizes depend on values
    return groups.ep.size() == groups.expt_tp.size() == 1 and config.moe_expert_capacity_factor is None


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
        rows = rows_by_expert(routing_map, self.config.moe_router_topk)
        self._token_of_row = rows % len(routing_map)
        tokens = hidden_states.reshape(-1, self._shape[-1]).index_select(0, self._token_of_row)
        return tokens, probs.T.reshape(-1).index_select(0, rows)

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
