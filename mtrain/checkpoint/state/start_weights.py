"""Start weights from a Hugging Face folder, a PEFT adapter, or a checkpoint of another program; on any layout.

The global tensors of Megatron-LM and Megatron-Bridge are ours. Only names differ: a prefix of the wrapper (`model.`,
`module.`, `model0.` of a virtual stage), norms under the names of TransformerEngine or of the local spec, and layers
and experts that are stacked in one tensor or spelled out, with a key each. Each rank maps files of Hugging Face and
PEFT and copies its own shards.

Whether a checkpoint holds the weights of a model is checked without building the model.
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
from mtrain.checkpoint.state.reader import Wanted, check_keys, check_shapes, load_parameters, memory_for
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
"""Beginning of the keys of multi-token prediction."""


def load_hf_weights(folder: Path, model: RankModel) -> None:
    """Starts from the weights of a folder, under any layout. Collective over the world; no tensor is sent.

    A rank reads views of the mapped files and its own shards; a tensor that is stored in another order, or in FP8 with
    scales, is read whole, one at a time. The optimizer's main weights follow.
    """
    chunks, optimizer, groups, config = model.chunks, model.optimizer, model.groups, model.config
    model.sharded.gather_parameters()  # a gather under way would overwrite what is loaded
    # every rank opens the folder itself: what is mapped in one process cannot be given to another
    saved = on_all_ranks(lambda: FolderTensors(source_for(folder, config.model)))

    def may_be_left(key: str) -> bool:
        # a run without depths may start from a model that has them
        return not config.model.layers_ahead and key.startswith(_DEPTHS)

    places = base_parameters([unwrap(chunk) for chunk in chunks], groups)
    # the source converts names and axes as it reads
    read_weights(saved, places, config.model, lambda key: key, may_be_left, filler_of(optimizer))


_PREFIX = re.compile(r"(model\d*\.)?(module\.)*")
_OPTIMIZER = re.compile(r"(chained_\d+\.)?(optimizer|opt_param_scheduler)\.")
"""Pattern of the keys of their optimizers, tensors and objects."""
_OBJECT = re.compile(r"(common_state|rng_state|rerun_state_machine_state)/shard_[\d.]+_[\d.]+")
"""Pattern of pickled objects of their training loop; since Megatron-Core 0.19 the first one replaces common.pt."""
_SCRATCH = ("._extra_state", ".local_tokens_per_expert", ".inv_freq")
STACKED_LAYERS = re.compile(r"\.layers\.(?!\d)")
_EXPERT = re.compile(r"\.mlp\.experts\.(?:local_experts|experts)\.")
STACKED_EXPERTS = re.compile(r"\.mlp\.experts\.(?!\d)")


@torch.no_grad()
def load_megatron_weights(folder: Path, model: RankModel) -> None:
    """Starts from the weights of another program's checkpoint; each rank reads its own shards. Collective.

    Reads the weights that computed, in the precision that they were saved in. The optimizer's main weights follow.
    """
    chunks, optimizer, groups, config = model.chunks, model.optimizer, model.groups, model.config
    model.sharded.gather_parameters()  # a gather under way would overwrite what is loaded
    on_first_rank(lambda: check_run_config(folder, config.model))  # a small file: one rank reads it for all
    saved = on_all_ranks(lambda: CheckpointTensors(folder))
    # they write the same weight in several ways
    theirs = keys_by_our_names(saved)
    wanted: dict[Tensor, Wanted] = {}
    for place in base_parameters([unwrap(chunk) for chunk in chunks], groups):
        # once for the spelling, which gives the dtype, and once more for tensors of that dtype to read into
        found = [in_their_words(shard, theirs) for shard in whole_of(place, place.key, place.data)]
        known = next((shard.key for shard in found if shard.key in saved.tensors), None)
        # unknown keys are refused below, with all other names
        values = memory_for(place.data, torch.float32 if known is None else saved.tensors[known].dtype)
        shards = [in_their_words(shard, theirs) for shard in whole_of(place, place.key, values)]
        wanted[place.data] = Wanted(values, shards)
    fill = filler_of(optimizer)

    def use(parameter: Tensor, values: Tensor) -> None:
        for shard in wanted[parameter].shards:
            if shard.may_be_padded:  # theirs is drawn, ours is zero
                shard.data.view(shard.at.shape)[max(0, config.model.vocab_size - shard.at.offset[0]) :].zero_()
        fill(parameter, values)

    # keys of their optimizer and training loop may stay unread
    load_parameters(saved, wanted, lambda key: canonical(key) is None, config.model.vocab_size, use)


def canonical(key: str) -> str | None:
    """Returns a weight's name without prefix, in the names of our own modules; None for any other key."""
    if _OPTIMIZER.match(key) or _OBJECT.fullmatch(key) or any(name in key for name in _SCRATCH):
        return None
    match = _PREFIX.match(key)
    return _EXPERT.sub(".mlp.experts.", canonical_name(key[match.end() if match else 0 :]))


def keys_by_our_names(saved: CheckpointTensors) -> dict[str, str]:
    """Returns `canonical` name -> key of each weight."""
    check_format(saved.folder, saved.tensors)
    return {named: key for key in saved.tensors if (named := canonical(key)) is not None}


def in_their_words(shard: Shard, theirs: Mapping[str, str]) -> Shard:
    """Returns the same slice with the key and the axes of the checkpoint; unchanged if it has no such key."""
    return next((each._replace(key=theirs[each.key]) for each in _spellings(shard) if each.key in theirs), shard)


def _spellings(shard: Shard) -> Iterator[Shard]:
    """Yields a shard with layers and experts stacked as in our key, or spelled out, which removes their axes."""
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
    """Returns the shard with the index along an axis in the key; None if the key has no such axis."""
    if not stacked.search(shard.key):
        return None

    def without(values: tuple[int, ...]) -> tuple[int, ...]:
        return (*values[:axis], *values[axis + 1 :])

    key = stacked.sub(f"{name}{shard.at.offset[axis]}.", shard.key, count=1)
    at = TensorSlice(without(shard.at.offset), without(shard.at.shape))
    return shard._replace(key=key, global_shape=without(shard.global_shape), at=at)


@torch.no_grad()
def load_peft_adapter(folder: Path, model: RankModel) -> None:
    """Copies a folder with adapter_config.json and adapter_model.safetensors into the adapters; the optimizer's main
    weights follow. Collective over the world."""
    chunks, optimizer, groups, config = model.chunks, model.optimizer, model.groups, model.config
    model.sharded.gather_parameters()  # a gather under way would overwrite what is loaded
    adapter = config.adapter
    assert adapter is not None, "called for runs with adapters"
    saved = on_all_ranks(lambda: PeftFolder(folder, family_of_run(config), config.model, adapter))
    weights: dict[Tensor, Tensor] = {}

    def in_float32(parameter: Tensor) -> Tensor | None:
        if not parameter.requires_grad:
            return None
        # values go to the main weights unrounded
        return weights.setdefault(parameter, torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False))

    for chunk in chunks:
        for part in sharded_tensors(unwrap(chunk), groups, in_float32):
            if is_adapter_key(part.key) or plan.is_learned_whole(config.model, adapter, part.key):
                axes = part.prepend_axis_num
                whole = saved.tensor(spelled_name(part.key, tuple(part.global_offset[:axes])))
                # a table has more rows here, which are padding and stay 0
                own = part.data[: max(0, len(whole) - part.global_offset[axes])]
                region = [slice(start, start + size) for start, size in zip(part.global_offset[axes:], own.shape)]
                own.copy_(whole[tuple(region)])
    fill = filler_of(optimizer)
    for parameter, values in weights.items():
        fill(parameter, values)


def check_weights(entry: CheckpointEntry, config: Config) -> None:
    """Compares names and shapes, as a run that starts from the checkpoint does; no tensor is read. If no family of
    Hugging Face describes the model, or it has a head, only the vocabulary is compared."""
    check_entry(entry, config.model)
    saved = CheckpointTensors(entry.path)
    table = _table(config)
    if table is None:
        return
    naming = Naming(saved, main=True)
    wanted = {naming.key_of(key): shape for key, shape in _padded(table, config).items()}
    check_keys(saved, wanted.keys(), naming.may_be_left)
    padded = {naming.key_of(key) for key in PADDED_TABLES}
    check_shapes(saved, wanted, padded, config.model.vocab_size)


def check_megatron_weights(folder: Path, config: Config) -> None:
    """Compares names and shapes of another program's checkpoint, in which layers and experts may be spelled out."""
    check_run_config(folder, config.model)
    saved = CheckpointTensors(folder)
    table = _table(config)
    if table is None:
        return
    theirs = keys_by_our_names(saved)
    shards = [in_their_words(shard, theirs) for shard in shards_of(table, _padded(table, config))]
    wanted = {shard.key: shard.global_shape for shard in shards}
    check_keys(saved, wanted.keys(), lambda key: canonical(key) is None)
    check_shapes(saved, wanted, {shard.key for shard in shards if shard.may_be_padded}, config.model.vocab_size)


def shards_of(table: Table, shapes: Mapping[str, Sizes]) -> Iterator[Shard]:
    """Yields each layer and each expert separately; without data."""
    for filled in table.slices:
        axes = sum(pattern.search(filled.key) is not None for pattern in (STACKED_LAYERS, STACKED_EXPERTS))
        offset, size = filled.at.offset, filled.at.shape
        for index in product(*map(range, offset[:axes], map(add, offset[:axes], size[:axes]))):
            at = TensorSlice((*index, *offset[axes:]), (*[1] * axes, *size[axes:]))
            yield Shard(filled.key, shapes[filled.key], at, torch.empty(0), filled.key in PADDED_TABLES)


def _table(config: Config) -> Table | None:
    """Returns the table of the model's parameters; None if no family describes it, or files lack its output."""
    if config.model.output.is_new:
        return None
    try:
        return family_of_run(config).table(config.model)
    except DataError:
        return None


def _padded(table: Table, config: Config) -> dict[str, Sizes]:
    """Returns global name -> shape of every parameter."""
    rows = padded_vocab_size(config.model, config.layout.tp)
    return {key: (rows, *shape[1:]) if key in PADDED_TABLES else shape for key, shape in table.shapes.items()}
