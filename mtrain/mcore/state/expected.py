"""Checks whether a checkpoint holds the weights of a model, without building the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from operator import add
from pathlib import Path

import torch

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import Sizes, TensorSlice
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.format.writer import Shard
from mtrain.checkpoint.store.directory import CheckpointEntry
from mtrain.checkpoint.store.megatron_checkpoint import check_run_config
from mtrain.config import Config
from mtrain.config.schema.model import HeadOutput
from mtrain.hf.schema.registry import family_of_run
from mtrain.hf.schema.table import Table
from mtrain.mcore.state.load import Naming, check_entry
from mtrain.mcore.state.reader import check_keys, check_shapes
from mtrain.mcore.state.start_weights import (
    STACKED_EXPERTS,
    STACKED_LAYERS,
    canonical,
    in_their_words,
    keys_by_our_names,
)
from mtrain.plan.parameters import padded_vocab_size

_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tables with a row for each token, and more rows as padding."""


def check_weights(entry: CheckpointEntry, config: Config) -> None:
    """Compares names and shapes, as a run that starts from the checkpoint does; no tensor is read.

    If no family of Hugging Face describes the model, or it has a head, only the vocabulary is compared.

    Args:
        entry: Checkpoint to check.
        config: Configuration of the run.

    Raises:
        DataError: The checkpoint is damaged, or of another model.
    """
    check_entry(entry, config)
    saved = CheckpointTensors(entry.path)
    table = None if isinstance(config.model.output, HeadOutput) else _table(config)
    if table is None:
        return
    naming = Naming(saved, main=True)
    wanted = {naming.key_of(key): shape for key, shape in _padded(table, config).items()}
    check_keys(saved, wanted.keys(), naming.may_be_left)
    padded = {naming.key_of(key) for key in _TABLES}
    check_shapes(saved, wanted, padded, config.model.vocab_size)


def check_megatron_weights(folder: Path, config: Config) -> None:
    """Compares names and shapes of another program's checkpoint, in which layers and experts may be spelled out.

    Args:
        folder: Folder from `megatron_folder`.
        config: Configuration of the run.

    Raises:
        DataError: The checkpoint is damaged, or of another model.
    """
    check_run_config(folder, config.model)
    saved = CheckpointTensors(folder)
    table = None if isinstance(config.model.output, HeadOutput) else _table(config)
    if table is None:
        return
    theirs = keys_by_our_names(saved)
    shards = [in_their_words(shard, theirs) for shard in _shards(table, _padded(table, config))]
    wanted = {shard.key: shard.global_shape for shard in shards}
    check_keys(saved, wanted.keys(), lambda key: canonical(key) is None)
    check_shapes(saved, wanted, {shard.key for shard in shards if shard.may_be_padded}, config.model.vocab_size)


def _shards(table: Table, shapes: Mapping[str, Sizes]) -> Iterator[Shard]:
    """Yields each layer and each expert separately; without data."""
    for filled in table.slices:
        axes = sum(pattern.search(filled.key) is not None for pattern in (STACKED_LAYERS, STACKED_EXPERTS))
        offset, size = filled.at.offset, filled.at.shape
        for index in product(*map(range, offset[:axes], map(add, offset[:axes], size[:axes]))):
            at = TensorSlice((*index, *offset[axes:]), (*[1] * axes, *size[axes:]))
            yield Shard(filled.key, shapes[filled.key], at, torch.empty(0), filled.key in _TABLES)


def _table(config: Config) -> Table | None:
    """Returns the table of the model's parameters; None where no family describes it."""
    try:
        return family_of_run(config).table(config.model)
    except DataError:
        return None


def _padded(table: Table, config: Config) -> dict[str, Sizes]:
    """Returns global name -> shape of every parameter."""
    rows = padded_vocab_size(config.model, config.layout.tp)
    return {key: (rows, *shape[1:]) if key in _TABLES else shape for key, shape in table.shapes.items()}
