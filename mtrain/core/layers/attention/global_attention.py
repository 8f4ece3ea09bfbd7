"""Attention of Gemma 4: normalised values, and in layers without a window separate heads, whose keys are the values.

Source: transformers 5.24, models/gemma4/modeling_gemma4.py, `Gemma4TextAttention`.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from torch import Tensor

from mtrain.core.layers.attention.rotating import RotatingAttention
from mtrain.core.layers.products import widened


class NormedValueAttention(RotatingAttention):
    """Self-attention of grouped queries whose values are normalised, head by head."""

    def get_query_key_value_tensors(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        """Returns what `RotatingAttention` does, with normed values."""
        query, key, value, *others = super().get_query_key_value_tensors(hidden_states, *arguments, **options)
        return query, key, normed(value, self.config.layernorm_epsilon), *others


class GlobalAttention(RotatingAttention):
    """Self-attention with separate heads: the projection gives each group its queries and a key; before norm and
    rotation the key is also the value."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        fields: Mapping[str, Any],
        normalises_values: bool,
        **options: Any,
    ) -> None:
        """Takes the fields of the configuration that differ in these layers, and megatron-core's arguments."""
        own = copy.copy(config)  # not `replace`, which would derive other fields once more
        for name, value in fields.items():
            setattr(own, name, value)
        submodules = copy.copy(submodules)
        submodules.linear_qkv = _WithoutValues
        super().__init__(own, submodules, layer_number, **options)
        # under a name that says what it holds: adapters, Muon and checkpoints go by names
        self.linear_qk = self._modules.pop("linear_qkv")
        self._normalises_values = normalises_values

    def get_query_key_value_tensors(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        """Returns queries [seq, batch, heads_local, head_dim], and keys and values [seq, batch, groups_local,
        head_dim], queries and keys rotated where `forward` has left that to it."""
        mixed, _ = self.linear_qk(hidden_states)
        grouped = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head))
        query, key = grouped[..., :-1, :].flatten(2, 3), grouped[..., -1, :]
        value = normed(key, self.config.layernorm_epsilon) if self._normalises_values else key
        return *self.rotated_here(self.q_layernorm(query), self.k_layernorm(key)), value


class _WithoutValues(ColumnParallelLinear):
    """The projection to queries and keys; megatron-core expects values as well."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(
            input_size, output_size - config.num_query_groups * config.kv_channels, config=config, **options
        )


def normed(heads: Tensor, epsilon: float) -> Tensor:
    """Divides each head by the root of its mean square, in float32 at least; [..., head_dim]."""
    wide = widened(heads)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(heads.dtype)
