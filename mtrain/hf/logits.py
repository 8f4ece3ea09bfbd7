"""What transformers computes; it is imported here only, and only when it is asked for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


@torch.no_grad()
def transformers_logits(folder: Path, tokens: Tensor) -> Tensor:
    """Logits [batch, seq, vocab_size] in float32 on the CPU.

    Args:
        folder: config.json and safetensors; no code of the folder runs.
        tokens: [batch, seq] int64.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False, local_files_only=True
    ).eval()
    logits: Tensor = model(tokens).logits
    return logits.float()
