"""Qwen3-Next and Qwen3.5 with the layer that predicts a token further ahead, which transformers leaves unread."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "model.safetensors"
LAYERS = 4
NET = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 16,
}
CONFIGS: dict[str, Any] = {
    "qwen3-next": lambda common: transformers.Qwen3NextConfig(**common, **NET, **EXPERTS),
    "qwen3.5": lambda common: transformers.Qwen3_5TextConfig(**common, **NET),
    "qwen3.5-moe": lambda common: transformers.Qwen3_5MoeTextConfig(
        **{name: value for name, value in common.items() if name != "intermediate_size"}, **NET, **EXPERTS
    ),
}
COMMON: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 61,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
OWN = {"fc": (32, 64), "norm": (32,), "pre_fc_norm_embedding": (32,), "pre_fc_norm_hidden": (32,)}
"""Tensors next to the layer, which has the names of a model's last one, and their shapes."""
_LAST, _LAYER = f"model.layers.{LAYERS - 1}.", "mtp.layers.0."


def drawn(config: Any, seed: int) -> Any:
    """Draws a model of transformers in float32."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def saved(folder: Path, main: Any, other: Any, own: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Saves a model with a layer ahead.

    Args:
        folder: Path of the new folder.
        main: Model of transformers.
        other: Model whose last layer becomes the layer ahead; it is written by transformers, too.
        own: Tensors of `OWN`, by name.
        dtype: Dtype of all tensors.
    """
    other.to(dtype).save_pretrained(folder, max_shard_size="1GB")
    layer = {name: value for name, value in load_file(folder / FILE).items() if name.startswith(_LAST)}
    main.to(dtype).save_pretrained(folder, max_shard_size="1GB")
    ahead = {name.replace(_LAST, _LAYER): value for name, value in layer.items()}
    ahead |= {f"mtp.{name}.weight": value.detach().to(dtype) for name, value in own.items()}
    save_file(load_file(folder / FILE) | ahead, folder / FILE, {"format": "pt"})


def draw_own() -> dict[str, Tensor]:
    """Draws the tensors next to the layer."""
    return {name: torch.randn(shape) * 0.1 for name, shape in OWN.items()}


def save_ahead(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Saves a drawn model with a layer ahead."""
    config = CONFIGS[name](COMMON)
    saved(folder, drawn(config, 1), drawn(config, 2), draw_own(), dtype)
