"""Reads the tensors of a Megatron-LM or Megatron-Bridge checkpoint under our names, for an export without ranks."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtrain.arch.parameters import PADDED_TABLES
from mtrain.base.errors import ConfigError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.format.safe_metadata import GlobalTensor
from mtrain.checkpoint.state.reader import check_keys, check_shapes
from mtrain.checkpoint.state.start_weights import (
    STACKED_EXPERTS,
    STACKED_LAYERS,
    canonical,
    shards_of,
    their_keys_by_name,
    with_their_key,
)
from mtrain.checkpoint.store.megatron_checkpoint import check_run_config
from mtrain.config.load import MergedContent, read_file
from mtrain.config.schema.model import ModelSection
from mtrain.hf.configuration import resolved
from mtrain.hf.schema.description import described_model
from mtrain.hf.schema.table import Table

_ANY_RUN: dict[str, Any] = {
    "run": {"dir": "unused"},
    "train": {"global_batch_size": 1, "num_steps": 1},
    "optimizer": {"lr": 1.0},
    "data": {"kind": "mock", "seq_length": 2},
}
"""The other required sections of a configuration, since a model is validated as part of one."""


class _Piece(NamedTuple):
    """A layer or an expert of one of our tensors."""

    at: TensorSlice
    """Slice of our tensor."""
    key: str
    """Key in the checkpoint."""
    dropped: tuple[int, ...]
    """Axes of our tensor that the checkpoint lacks, since it has a key per layer or expert."""


class MegatronTensors:
    """Tensors by our global names, read slice by slice."""

    def __init__(self, folder: Path, model: ModelSection, table: Table) -> None:
        """Opens a checkpoint and compares it with the model."""
        check_run_config(folder, model)
        self.folder, self._saved = folder, CheckpointTensors(folder)
        their_keys = their_keys_by_name(self._saved)
        # their number of rows, with padding for their number of ranks
        rows = {key: self._saved.tensors[their_keys[key]].shape[0] for key in PADDED_TABLES if key in their_keys}
        shapes = {key: (rows.get(key, shape[0]), *shape[1:]) for key, shape in table.shapes.items()}
        pairs = [(shard, with_their_key(shard, their_keys)) for shard in shards_of(table, shapes)]
        their_shapes = {their.key: their.global_shape for _, their in pairs}
        check_keys(self._saved, their_shapes.keys(), lambda key: canonical(key) is None)
        check_shapes(
            self._saved, their_shapes, {their.key for _, their in pairs if their.may_be_padded}, model.vocab_size
        )
        self._pieces: dict[str, list[_Piece]] = {}
        self.tensors: dict[str, GlobalTensor] = {}
        """Key -> facts of each tensor, without its saved slices."""
        for shard, their in pairs:
            piece = _Piece(shard.at, their.key, _dropped(shard.key, their.key))
            self._pieces.setdefault(shard.key, []).append(piece)
            self.tensors[shard.key] = GlobalTensor(self._saved.tensors[their.key].dtype, shapes[shard.key], ())

    def read(self, key: str, region: TensorSlice) -> Tensor:
        """Reads a region of a tensor; do not write to the result."""
        overlaps = [
            (piece, shared) for piece in self._pieces[key] if (shared := piece.at.intersect(region)) is not None
        ]
        if len(overlaps) == 1 and overlaps[0][1] == region:
            return self._part(overlaps[0][0], region)
        result = torch.empty(region.shape, dtype=self.tensors[key].dtype)
        for piece, shared in overlaps:
            shared.within(region).of(result).copy_(self._part(piece, shared))
        return result

    def _part(self, piece: _Piece, at: TensorSlice) -> Tensor:
        def remaining(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(size for axis, size in enumerate(sizes) if axis not in piece.dropped)

        return self._saved.read(piece.key, TensorSlice(remaining(at.offset), remaining(at.shape))).view(at.shape)


def _dropped(ours: str, theirs: str) -> tuple[int, ...]:
    """Returns the stacked axes of our key that their key replaces by numbers."""
    named = canonical(theirs) or ""
    patterns: list[re.Pattern[str]] = [stacked for stacked in (STACKED_LAYERS, STACKED_EXPERTS) if stacked.search(ours)]
    return tuple(axis for axis, pattern in enumerate(patterns) if not pattern.search(named))


def model_of(folder: Path, described: Path | None) -> ModelSection:
    """Returns the model of another program's checkpoint, which only a pickle describes.

    Args:
        described: Hugging Face folder, or YAML file with the section `model`, that describes the model.
    """
    if described is None:
        raise ConfigError(
            f"{folder} is a checkpoint of Megatron-LM or Megatron-Bridge, and only a pickle describes its model; pass "
            "--like with a Hugging Face folder of this model, or --model with a file such as "
            "configs/model/llama3_8b.yaml"
        )
    if not described.is_file():
        return described_model(described)
    file = read_file(described)
    if not isinstance(file.content.get("model"), dict):
        raise ConfigError(f"{described} has no section `model`; name a file such as configs/model/llama3_8b.yaml")
    return MergedContent({**_ANY_RUN, "model": file.content["model"]}, (file,)).config(resolved).model
