"""Contents of a checkpoint, also of Megatron-LM's and Bridge's, from its lists alone: no tensor is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.format.safe_metadata import GlobalTensor
from mtrain.checkpoint.format.training_state import STATE_NAME, TrainingState, read_state
from mtrain.checkpoint.store.directory import checkpoint_at
from mtrain.checkpoint.store.manifest import Manifest
from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder

OPTIMIZER, RANDOM = "optimizer", "random states"
WEIGHTS = "weights"


class Contents(NamedTuple):
    """Lists of a checkpoint that was opened."""

    folder: Path
    tensors: CheckpointTensors
    manifest: Manifest | None
    """Manifest; None for checkpoints of other programs."""
    state: TrainingState | None
    warnings: tuple[str, ...]
    """Reports of newer checkpoints that are not whole."""


class Total(NamedTuple):
    """Size of a group of tensors."""

    num_tensors: int
    num_elements: int
    size_bytes: int


def contents_of(path: Path) -> Contents:
    """Opens a checkpoint, a run folder (its newest good checkpoint), or a checkpoint of Megatron-LM or Bridge.

    Raises:
        DataError: There is no checkpoint, or it is not whole: a list is damaged, a file is missing or has another size.
        MachineError: The checkpoint cannot be read.
    """
    # first: a folder of Megatron-LM has no manifest, and checkpoint_at would call it no checkpoint
    megatron = megatron_folder(path)
    if megatron is not None:
        return Contents(megatron, CheckpointTensors(megatron), None, None, ())
    newest = checkpoint_at(path)
    assert newest.entry is not None, "checkpoint_at raises where there is none"
    folder = newest.entry.path
    state = read_state(folder) if (folder / STATE_NAME).exists() else None
    return Contents(folder, CheckpointTensors(folder), newest.entry.manifest, state, newest.warnings)


def group_of(key: str) -> str:
    """Returns the group of a tensor: WEIGHTS, OPTIMIZER or RANDOM."""
    # `chained_N.` is how megatron-core's ChainedOptimizer names the states of several optimizers
    if key.startswith(("optimizer.", "chained_")):
        return OPTIMIZER
    return RANDOM if key.startswith(("rng.", "rng_state")) else WEIGHTS


def size_bytes(tensor: GlobalTensor) -> int:
    """Returns the size of the tensor's values, without padding of files."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def totals(contents: Contents) -> dict[tuple[str, str], Total]:
    """Sums up the tensors of each (group, dtype)."""
    found: dict[tuple[str, str], Total] = {}
    for key, tensor in contents.tensors.tensors.items():
        kind = group_of(key), str(tensor.dtype).removeprefix("torch.")
        known = found.get(kind, Total(0, 0, 0))
        found[kind] = Total(
            known.num_tensors + 1,
            known.num_elements + math.prod(tensor.shape),
            known.size_bytes + size_bytes(tensor),
        )
    return found


def described(contents: Contents) -> dict[str, str]:
    """Describes a checkpoint for people, from its own statements: name -> value."""
    shown = {"checkpoint": str(contents.folder)}
    if contents.manifest is None:
        return shown | {"written by": "another program (torch_dist); no manifest, no checksums"}
    manifest = contents.manifest
    shown |= {"step": str(manifest.step), "tokens": f"{manifest.tokens:,}", "layout": manifest.layout}
    if contents.state is not None:
        shown |= {"vocabulary": str(contents.state.vocab_size), "device": contents.state.device}
    shown |= {"versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items())}
    shown |= {"configuration": f"SHA-256 {manifest.config_hash}"}
    if manifest.dataset is not None:
        shown["data"] = f"fingerprint {manifest.dataset}"
    if manifest.git is not None:
        shown["git"] = manifest.git.commit + (" with local changes" if manifest.git.dirty else "")
    if manifest.valid_loss is not None:
        shown["validation"] = f"{manifest.valid_loss} nats"
    if manifest.changes:
        shown["changed"] = "; ".join(
            f"after step {each.step} {each.key}: {each.old or 'missing'} -> {each.new or 'missing'}"
            for each in manifest.changes
        )
    if manifest.skipped:
        shown["left out"] = "; ".join(f"step {each.step}: {each.reason}" for each in manifest.skipped)
    size = sum(facts.size_bytes for facts in manifest.files.values())
    return shown | {"files": f"{len(manifest.files)}, {size:,} bytes"}
