"""Models and batches: those that are measured on a GPU, and small ones of the same kinds for a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from mtrain.config import Config

Device = Literal["cpu", "cuda"]
Model = dict[str, Any]

ONE_B: Model = {
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 128256,
    "tied_embeddings": True,
}
EIGHT_B: Model = {
    "num_layers": 8,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 128256,
}
"""Eight of the 32 layers of Llama 3.1 8B: as many as one GPU holds with its optimizer."""
EXPERTS: Model = {
    "num_layers": 8,
    "hidden_size": 2048,
    "ffn_hidden_size": 6144,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "experts": {"num_experts": 64, "top_k": 8, "ffn_hidden_size": 768},
}
HYBRID: Model = {
    "num_layers": 8,
    "hidden_size": 2048,
    "ffn_hidden_size": 6144,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "head_dim": 256,
    "vocab_size": 151936,
    "zero_centered_norm": True,
    "qk_norm": True,
    "attention_gate": True,
    "rope": {"base": 10000000, "partial": 0.25},
    "delta_net": {
        "num_key_heads": 16,
        "num_value_heads": 32,
        "key_head_dim": 128,
        "value_head_dim": 128,
        "conv_kernel": 4,
        "full_attention_every": 4,
    },
}
"""Layers of Qwen3.5's kind: three delta nets, then attention."""
WINDOWS: Model = ONE_B | {"sliding_window": 1024, "global_attention_every": 4}
TINY: Model = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 256,
    "init_std": 0.1,
}
"""Small model with large weights, so that attention is uneven and a wrong angle or mask shows in the loss."""
TINY_EXPERTS: Model = TINY | {
    "ffn_hidden_size": 32,
    "experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32},
}
"""Small model with experts of one size, as in Mixtral, whose names of tensors the judge knows."""
TINY_HYBRID: Model = TINY | {
    "zero_centered_norm": True,
    "delta_net": {
        "num_key_heads": 2,
        "num_value_heads": 4,
        "key_head_dim": 16,
        "value_head_dim": 16,
        "conv_kernel": 4,
        "full_attention_every": 2,
    },
}
TINY_WINDOWS: Model = TINY | {"sliding_window": 9, "global_attention_every": 2}


@dataclass(frozen=True)
class Bench:
    """Device and size of the sections."""

    device: Device
    is_tiny: bool
    compiles_tiny: bool = False
    """Whether the reference is compiled for small shapes, too, which takes a minute on a CPU."""

    @property
    def torch_device(self) -> torch.device:
        """First GPU, or the CPU."""
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def rounds(self) -> int:
        """Number of steps that are measured of each contender."""
        return 2 if self.is_tiny else 6

    @property
    def device_name(self) -> str:
        """Name of the device, as torch calls it."""
        return torch.cuda.get_device_name(0) if self.device == "cuda" else "CPU"

    def synchronize(self) -> None:
        """Waits for the GPU."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def config_of(bench: Bench, model: Model, **changes: Any) -> Config:
    """Makes the configuration of a run on mock data.

    Args:
        bench: Bench that determines the device.
        model: Architecture of the model.
        **changes: Values that replace the defaults, as `section__key=value`.
    """
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": "unused"},
        "model": {"backend": "torch", **model},
        "train": {"global_batch_size": 2, "num_steps": 1000, "precision": "fp32", "device": bench.device},
        "optimizer": {"lr": 1e-3, "schedule": "constant"},
        "data": {"kind": "mock", "seq_length": 64},
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        sections.setdefault(section, {})[key] = value
    return Config.model_validate(sections)


def speed_config(bench: Bench, model: Model, seq_length: int, micro_batch_size: int, **changes: Any) -> Config:
    """Makes a step of 32,768 tokens in bf16; tiny: of 2 rows of 32, as every event of a profile costs time."""
    seq, batch, micro = (32, 2, 1) if bench.is_tiny else (seq_length, 32768 // seq_length, micro_batch_size)
    given = {
        "train__global_batch_size": batch,
        "train__micro_batch_size": micro,
        "train__precision": "bf16",
        "train__compile": "none",
        "data__seq_length": seq,
    }
    return config_of(bench, model, **given | changes)
