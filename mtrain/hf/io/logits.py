"""Logits by transformers, which is imported only here, and only when it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrain.base.errors import MachineError


@torch.no_grad()
def transformers_logits(folder: Path, tokens: Tensor) -> Tensor:
    """Computes logits [batch, seq, vocab_size] in float32 on the CPU.

    Args:
        folder: Path of a folder with config.json and safetensors; no code of the folder runs.
        tokens: [batch, seq] int64 token ids.

    Raises:
        MachineError: transformers is not installed.
    """
    logits: Tensor = open_model(folder)(tokens).logits
    return logits.float()


def open_model(folder: Path) -> Any:
    """Opens the model of a folder in transformers: float32, on the CPU, without dropout; no code of the folder runs.

    Raises:
        MachineError: transformers is not installed.
    """
    try:
        # here, since it takes seconds and most commands do not need it
        import transformers
    except ModuleNotFoundError:
        raise MachineError(
            "this needs transformers, which is not installed; pip install 'transformers>=5,<6'"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    # eager: fused attention rounds otherwise and differs by version; local files only: missing ones would be fetched
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False, local_files_only=True
    ).eval()
