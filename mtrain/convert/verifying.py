"""Comparison of an existing checkpoint with an existing Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from mtrain.base.errors import DataError
from mtrain.checkpoint.store.verification import verify_files
from mtrain.convert.proof import Proof, prove
from mtrain.convert.target import open_target
from mtrain.hf.io.source import open_source
from mtrain.hf.schema.description import disagreements


def verify_hf(checkpoint: Path, hf: Path, num_workers: int) -> Proof:
    """Compares a checkpoint with a folder, tensor by tensor; a float32 folder is compared with a run's main weights.

    Args:
        checkpoint: Folder of a checkpoint, or of a run.
        hf: Folder with config.json and safetensors.
        num_workers: Number of threads.

    Raises:
        DataError: One of them is damaged, they hold different models, or tensors differ.
    """
    source = open_source(hf)
    target = open_target(checkpoint, hf, source.dtype)
    if differing := disagreements(source.model, target.model):
        shown = "; ".join(f"model.{name}={mine}, but {theirs} there" for name, theirs, mine in differing)
        raise DataError(f"{hf} holds another model than {checkpoint} ({shown}); name another folder")
    verify_files(target.entry, target.files(), num_workers)
    return prove(source.table, target.tensors, target.key, source.weights, "checkpoint", num_workers)
