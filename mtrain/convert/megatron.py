"""Tensors of a Megatron-LM or Megatron-Bridge checkpoint under our names, for an export without ranks."""

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
    in_their_words,
    keys_by_our_names,
    shards_of,
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
"""Sections next to the model, which are validated with it."""


class _Piece(NamedTuple):
    """A layer of one of our tensors, or an expert in it."""

    at: TensorSlice
    """Slice of our tensor."""
    key: str
    """Key in the checkpoint."""
    dropped: tuple[int, ...]
    """Axes of our tensor that the checkpoint spells out in keys instead."""


class MegatronTensors:
    """Tensors by our global names, read slice by slice."""

    def __init__(self, folder: Path, model: ModelSection, table: Table) -> None:
        """Opens a checkpoint and compares it with the model."""
        check_run_config(folder, model)
        self.folder, self._saved = folder, CheckpointTensors(folder)
        theirs = keys_by_our_names(self._saved)
        # as many rows as they have: padding for their number of ranks
        rows = {key: self._saved.tensors[theirs[key]].shape[0] for key in PADDED_TABLES if key in theirs}
        shapes = {key: (rows.get(key, shape[0]), *shape[1:]) for key, shape in table.shapes.items()}
        found = [(shard, in_their_words(shard, theirs)) for shard in shards_of(table, shapes)]
        wanted = {their.key: their.global_shape for _, their in found}
        check_keys(self._saved, wanted.keys(), lambda key: canonical(key) is None)
        check_shapes(self._saved, wanted, {their.key for _, their in found if their.may_be_padded}, model.vocab_size)
        self._pieces: dict[str, list[_Piece]] = {}
        self.tensors: dict[str, GlobalTensor] = {}
        """Facts of each tensor, without the places of its bytes."""
        for shard, their in found:
            piece = _Piece(shard.at, their.key, _dropped(shard.key, their.key))
            self._pieces.setdefault(shard.key, []).append(piece)
            self.tensors[shard.key] = GlobalTensor(self._saved.tensors[their.key].dtype, shapes[shard.key], ())

    def read(self, key: str, wanted: TensorSlice) -> Tensor:
        """Reads one slice of a tensor; the result must not be written to."""
        found = [(piece, shared) for piece in self._pieces[key] if (shared := piece.at.intersect(wanted)) is not None]
        if len(found) == 1 and found[0][1] == wanted:
            return self._part(found[0][0], wanted)
        result = torch.empty(wanted.shape, dtype=self.tensors[key].dtype)
        for piece, shared in found:
            shared.within(wanted).of(result).copy_(self._part(piece, shared))
        return result

    def _part(self, piece: _Piece, at: TensorSlice) -> Tensor:
        def kept(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(size for axis, size in enumerate(sizes) if axis not in piece.dropped)

        return self._saved.read(piece.key, TensorSlice(kept(at.offset), kept(at.shape))).view(at.shape)


def _dropped(ours: str, theirs: str) -> tuple[int, ...]:
    """Returns the stacked axes of our key that theirs spells out."""
    named = canonical(theirs) or ""
    patterns: list[re.Pattern[str]] = [each for each in (STACKED_LAYERS, STACKED_EXPERTS) if each.search(ours)]
    return tuple(axis for axis, pattern in enumerate(patterns) if not pattern.search(named))


def model_of(folder: Path, described: Path | None) -> ModelSection:
    """Returns the model of another program's checkpoint, which does not say it in a form that could be read safely.

    A Hugging Face folder, or a YAML file with the section `model`, describes it.
    """
    if described is None:
        raise ConfigError(
            f"{folder} is a checkpoint of Megatron-LM or Megatron-Bridge, and only a pickle describes its model; give "
            "--like a Hugging Face folder of this model, or --model a file such as configs/model/llama3_8b.yaml"
        )
    if not described.is_file():
        return described_model(described)
    given = read_file(described)
    if not isinstance(given.content.get("model"), dict):
        raise ConfigError(f"{described}: there is no section `model`; name a file such as configs/model/llama3_8b.yaml")
    return MergedContent({**_ANY_RUN, "model": given.content["model"]}, (given,)).config(resolved).model
