"""Start weights from a Hugging Face folder, a PEFT adapter, or another program's checkpoint, on any layout.

Megatron-LM and Megatron-Bridge have the same global tensors as we do, under other names: a wrapper's prefix (`model.`,
`module.`, `model0.` of a virtual stage), norms named by TransformerEngine or by the local spec, and layers and experts
that are stacked in one tensor or have a key each. Each rank maps the files of Hugging Face and PEFT, and copies its own
shards.

The checks compare a checkpoint with a model without building the model.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from operator import add
from pathlib import Path

import torch
from torch import Tensor

from mtrain.arch import adapters as plan
from mtrain.arch.parameters import PADDED_TABLES, padded_vocab_size
from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import Sizes, TensorSlice
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.state.load import Naming, check_entry, filler_of, read_weights
from mtrain.checkpoint.state.reader import ReadTarget, check_keys, check_shapes, load_parameters, target_of
from mtrain.checkpoint.store.directory import CheckpointEntry
from mtrain.checkpoint.store.megatron_checkpoint import check_format, check_run_config
from mtrain.config import Config
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.layers.adapters.adapter import is_adapter_key
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.init_weights import sharded_tensors
from mtrain.core.layers.layer_spec import canonical_name, spelled_name
from mtrain.core.layers.sharded_parameters import base_parameters, whole_of
from mtrain.core.ranks.init import on_all_ranks, on_first_rank
from mtrain.core.state.shard import Shard
from mtrain.hf.io.peft import PeftFolder
from mtrain.hf.io.source import FolderTensors, source_for
from mtrain.hf.schema.registry import family_of_run
from mtrain.hf.schema.table import Table

_DEPTHS = "mtp."
"""Prefix of the keys of multi-token prediction (MTP)."""


def load_hf_weights(folder: Path, model: RankModel) -> None:
    """Starts from the weights of a Hugging Face folder, under any layout. Collective over the world; sends no tensor.

    Each rank copies its shards from mapped files; a tensor that is stored in another order, or in FP8 with scales, is
    read whole, one at a time. Also sets the optimizer's main weights.
    """
    chunks, optimizer, groups, config = model.chunks, model.optimizer, model.groups, model.config
    model.sharded.gather_parameters()  # a gather in flight would overwrite the loaded values
    # every rank opens the folder, because ranks cannot share mappings
    saved = on_all_ranks(lambda: FolderTensors(source_for(folder, config.model)))

    def may_be_left(key: str) -> bool:
        # a run without MTP may start from a model that has it
        return not config.model.layers_ahead and key.startswith(_DEPTHS)

    parameters = base_parameters([unwrap(chunk) for chunk in chunks], groups)
    # the source converts names and axes as it reads
    read_weights(saved, parameters, config.model, lambda key: key, may_be_left, filler_of(optimizer))


_PREFIX = re.compile(r"(model\d*\.)?(module\.)*")
_OPTIMIZER = re.compile(r"(chained_\d+\.)?(optimizer|opt_param_scheduler)\.")
"""Pattern of optimizer keys in their checkpoints, for tensors and objects."""
_OBJECT = re.compile(r"(common_state|rng_state|rerun_state_machine_state)/shard_[\d.]+_[\d.]+")
"""Pattern of their training loop's pickled objects; since Megatron-Core 0.19, `common_state` replaces common.pt."""
_SCRATCH = ("._extra_state", ".local_tokens_per_expert", ".inv_freq")
STACKED_LAYERS = re.compile(r"\.layers\.(?!\d)")
_EXPERT = re.compile(r"\.mlp\.experts\.(?:local_experts|experts)\.")
STACKED_EXPERTS = re.compile(r"\.mlp\.experts\.(?!\d)")


@torch.no_grad()
def load_megatron_weights(folder: Path, model: RankModel) -> None:
    """Starts from the weights of another program's checkpoint; each rank reads its own shards. Collective.

    Reads the model's weights, not the main weights, in their precision on disk. Also sets the optimizer's main weights.
    """
    chunks, optimizer, groups, config = model.chunks, model.optimizer, model.groups, model.config
    model.sharded.gather_parameters()  # a gather in flight would overwrite the loaded values
    on_first_rank(lambda: check_run_config(folder, config.model))
    saved = on_all_ranks(lambda: CheckpointTensors(folder))
    their_keys = their_keys_by_name(saved)
    targets: dict[Tensor, ReadTarget] = {}
    for sharded in base_parameters([unwrap(chunk) for chunk in chunks], groups):
        # first for the key, which determines the dtype, then again for memory of that dtype
        spelled = [with_their_key(shard, their_keys) for shard in whole_of(sharded, sharded.key, sharded.data)]
        known = next((shard.key for shard in spelled if shard.key in saved.tensors), None)
        # load_parameters refuses unknown keys
        dtype = torch.float32 if known is None else saved.tensors[known].dtype
        values, shards = target_of(sharded, sharded.key, dtype)
        targets[sharded.data] = ReadTarget(values, [with_their_key(shard, their_keys) for shard in shards])
    fill = filler_of(optimizer)

    def use(parameter: Tensor, values: Tensor) -> None:
        for shard in targets[parameter].shards:
            if shard.may_be_padded:  # their padding is random, ours is zero
                shard.data.view(shard.at.shape)[max(0, config.model.vocab_size - shard.at.offset[0]) :].zero_()
        fill(parameter, values)

    # keys of their optimizer and training loop may stay unread
    load_parameters(saved, targets, lambda key: canonical(key) is None, config.model.vocab_size, use)


def canonical(key: str) -> str | None:
    """Converts a weight's key to our name, without the wrapper's prefix; None for any other key."""
    if _OPTIMIZER.match(key) or _OBJECT.fullmatch(key) or any(name in key for name in _SCRATCH):
        return None
    match = _PREFIX.match(key)
    return _EXPERT.sub(".mlp.experts.", canonical_name(key[match.end() if match else 0 :]))


def their_keys_by_name(saved: CheckpointTensors) -> dict[str, str]:
    """Returns `canonical` name -> key on disk of each weight."""
    check_format(saved.folder, saved.tensors)
    return {named: key for key in saved.tensors if (named := canonical(key)) is not None}


def with_their_key(shard: Shard, their_keys: Mapping[str, str]) -> Shard:
    """Returns the slice with the checkpoint's key and axes; unchanged if the checkpoint does not have it."""
    return next(
        (
            spelling._replace(key=their_keys[spelling.key])
            for spelling in _spellings(shard)
            if spelling.key in their_keys
        ),
        shard,
    )


def _spellings(shard: Shard) -> Iterator[Shard]:
    """Yields a shard with layers and experts stacked, as in our key, or numbered in the key, without their axes."""
    name = canonical(shard.key)
    assert name is not None, shard.key
    stacked = shard._replace(key=name)
    for layered in (stacked, _spelled(stacked, STACKED_LAYERS, ".layers.", 0)):
        if layered is None:
            continue
        yield layered
        depth = len(layered.global_shape) - len(shard.global_shape) + int(STACKED_LAYERS.search(name) is not None)
        experts = _spelled(layered, STACKED_EXPERTS, ".mlp.experts.", depth)
        if experts is not None:
            yield experts


def _spelled(shard: Shard, stacked: re.Pattern[str], name: str, axis: int) -> Shard | None:
    """Moves the index along an axis into the shard's key; None if the key has no such axis."""
    if not stacked.search(shard.key):
        return None

    def without(values: tuple[int, ...]) -> tuple[int, ...]:
        return (*values[:axis], *values[axis + 1 :])

    key = stacked.sub(f"{name}{shard.at.offset[axis]}.", shard.key, count=1)
    at = TensorSlice(without(shard.at.offset), without(shard.at.shape))
    return shard._replace(key=key, global_shape=without(shard.global_shape), at=at)


@torch.no_grad()
def load_peft_adapter(folder: Path, model: RankModel) -> None:
    """Loads a PEFT folder (adapter_config.json and adapter_model.safetensors) into the adapters and the optimizer's
    main weights. Collective over the world."""
    chunks, optimizer, groups, config = model.chunks, model.optimizer, model.groups, model.config
    model.sharded.gather_parameters()  # a gather in flight would overwrite the loaded values
    adapter = config.adapter
    assert adapter is not None, "called for runs with adapters"
    saved = on_all_ranks(lambda: PeftFolder(folder, family_of_run(config), config.model, adapter))
    weights: dict[Tensor, Tensor] = {}

    def in_float32(parameter: Tensor) -> Tensor | None:
        if not parameter.requires_grad:
            return None
        # float32, so that main weights are not rounded
        return weights.setdefault(parameter, torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False))

    for chunk in chunks:
        for part in sharded_tensors(unwrap(chunk), groups, in_float32):
            if is_adapter_key(part.key) or plan.is_learned_whole(config.model, adapter, part.key):
                axes = part.prepend_axis_num
                whole = saved.tensor(spelled_name(part.key, tuple(part.global_offset[:axes])))
                # a table's further rows are padding and stay 0
                target = part.data[: max(0, len(whole) - part.global_offset[axes])]
                region = [slice(start, start + size) for start, size in zip(part.global_offset[axes:], target.shape)]
                target.copy_(whole[tuple(region)])
    fill = filler_of(optimizer)
    for parameter, values in weights.items():
        fill(parameter, values)


def check_weights(entry: CheckpointEntry, config: Config) -> None:
    """Compares names and shapes, as a run that starts from the checkpoint does; reads no tensor. Compares only the
    vocabulary if no Hugging Face family describes the model, or if it has a new head."""
    check_entry(entry, config.model)
    saved = CheckpointTensors(entry.path)
    table = _table(config)
    if table is None:
        return
    naming = Naming(saved, main=True)
    shapes = {naming.key_of(key): shape for key, shape in _padded(table, config).items()}
    check_keys(saved, shapes.keys(), naming.may_be_left)
    padded = {naming.key_of(key) for key in PADDED_TABLES}
    check_shapes(saved, shapes, padded, config.model.vocab_size)


def check_megatron_weights(folder: Path, config: Config) -> None:
    """Compares names and shapes of another program's checkpoint; reads no tensor."""
    check_run_config(folder, config.model)
    saved = CheckpointTensors(folder)
    table = _table(config)
    if table is None:
        return
    their_keys = their_keys_by_name(saved)
    shards = [with_their_key(shard, their_keys) for shard in shards_of(table, _padded(table, config))]
    shapes = {shard.key: shard.global_shape for shard in shards}
    check_keys(saved, shapes.keys(), lambda key: canonical(key) is None)
    check_shapes(saved, shapes, {shard.key for shard in shards if shard.may_be_padded}, config.model.vocab_size)


def shards_of(table: Table, shapes: Mapping[str, Sizes]) -> Iterator[Shard]:
    """Yields a shard without data for each layer and each expert of every parameter."""
    for filled in table.slices:
        axes = sum(pattern.search(filled.key) is not None for pattern in (STACKED_LAYERS, STACKED_EXPERTS))
        offset, size = filled.at.offset, filled.at.shape
        for index in product(*map(range, offset[:axes], map(add, offset[:axes], size[:axes]))):
            at = TensorSlice((*index, *offset[axes:]), (*[1] * axes, *size[axes:]))
            yield Shard(filled.key, shapes[filled.key], at, torch.empty(0), filled.key in PADDED_TABLES)


def _table(config: Config) -> Table | None:
    """Returns the table of the model's parameters; None if no family describes the model, or it has a new head."""
    if config.model.output.is_new:
        return None
    try:
        return family_of_run(config).table(config.model)
    except DataError:
        return None


def _padded(table: Table, config: Config) -> dict[str, Sizes]:
    """Returns global name -> shape of every parameter, with padding rows of tables."""
    rows = padded_vocab_size(config.model, config.layout.tp)
    return {key: (rows, *shape[1:]) if key in PADDED_TABLES else shape for key, shape in table.shapes.items()}
