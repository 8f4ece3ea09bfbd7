"""Attention of Gemma 4: normalised values, and heads of another shape, with keys as values, in layers without a window.

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
    """Grouped-query self-attention that normalises the values of each head."""

    def get_query_key_value_tensors(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        """Returns the result of `RotatingAttention` with normalised values."""
        query, key, value, *further = super().get_query_key_value_tensors(hidden_states, *arguments, **options)
        return query, key, normed(value, self.config.layernorm_epsilon), *further


class GlobalAttention(RotatingAttention):
    """Self-attention with heads of its own shape. The projection yields queries and one key for each group; the key
    before norm and rotation is also the value."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        fields: Mapping[str, Any],
        normalises_values: bool,
        **options: Any,
    ) -> None:
        """Makes the layer.

        Args:
            config: Configuration of the model's other layers.
            fields: Fields of the configuration that differ in these layers.
            normalises_values: Whether values are normalised.
        """
        layer_config = copy.copy(config)  # not `replace`, which would derive other fields again
        for name, value in fields.items():
            setattr(layer_config, name, value)
        submodules = copy.copy(submodules)
        submodules.linear_qkv = _WithoutValues
        super().__init__(layer_config, submodules, layer_number, **options)
        # renamed by its content, since adapters, Muon and checkpoints identify modules by name
        self.linear_qk = self._modules.pop("linear_qkv")
        self.core_attention.sees_ahead = False  # images see later tokens only in layers with a window
        self._normalises_values = normalises_values

    def get_query_key_value_tensors(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        """Returns queries, [seq, batch, heads_local, head_dim], and keys and values, [seq, batch, groups_local,
        head_dim]; queries and keys are rotated if `forward` has deferred that to this method."""
        mixed, _ = self.linear_qk(hidden_states)
        grouped = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head))
        query, key = grouped[..., :-1, :].flatten(2, 3), grouped[..., -1, :]
        value = normed(key, self.config.layernorm_epsilon) if self._normalises_values else key
        return *self.rotated_here(self.q_layernorm(query), self.k_layernorm(key)), value


class _WithoutValues(ColumnParallelLinear):
    """Projection to queries and keys; megatron-core's output size also counts values."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(
            input_size, output_size - config.num_query_groups * config.kv_channels, config=config, **options
        )


def normed(heads: Tensor, epsilon: float) -> Tensor:
    """Divides each head, [..., head_dim], by its root mean square, computed in at least float32."""
    wide = widened(heads)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(heads.dtype)
