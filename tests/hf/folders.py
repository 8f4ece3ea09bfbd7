"""Folders of Hugging Face with random weights, in shapes that a careless conversion gets wrong."""

from pathlib import Path
from typing import Any

import torch
import transformers

AWKWARD: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 32,  # as hidden: no shape tells a transposed matrix
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 57,
    "head_dim": 16,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**AWKWARD, rope_parameters=LLAMA3),
    "llama-biased": lambda: transformers.LlamaConfig(**AWKWARD, attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: transformers.LlamaConfig(**{**AWKWARD, "tie_word_embeddings": True}),
    "mistral": lambda: transformers.MistralConfig(**{**AWKWARD, "num_key_value_heads": 2}, sliding_window=9),
    "qwen2": lambda: transformers.Qwen2Config(
        **{**AWKWARD, "head_dim": 8, "tie_word_embeddings": True},
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        **{**AWKWARD, "num_key_value_heads": 4},
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
}


def save(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, max_shard_size: str = "30KB") -> Any:
    """Makes the model `name` with random weights in every tensor, saves it and gives it."""
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape) * 0.3)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model.eval()
