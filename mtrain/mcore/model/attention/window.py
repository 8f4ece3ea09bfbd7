"""Layers with a sliding window."""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention


def has_window(config: TransformerConfig, layer_number: int) -> bool:
    """Says whether a layer, counted from 1, has a window; layers after the model's last one are of its kind."""
    number = min(layer_number, config.num_layers)
    return bool(is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number))
