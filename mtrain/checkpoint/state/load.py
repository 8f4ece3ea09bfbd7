"""Training state on disk: saving, resuming on the same or on another layout, starting from other weights.

A checkpoint holds, under names that do not depend on the layout: the weights as they compute (`decoder...`), float32
main weights and Adam's moments (`optimizer.state.{param,exp_avg,exp_avg_sq}.decoder...`), the random states of each
rank (`rng...`), and in training_state.json the counters.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.state.base import base_of, check_base, refused_as_model
from mtrain.checkpoint.state.reader import GlobalTensors, Wanted, load_parameters, load_shards, memory_for
from mtrain.checkpoint.state.save import Provenance, Saver
from mtrain.checkpoint.store.directory import CheckpointEntry
from mtrain.checkpoint.store.manifest import STATE_NAME, BaseInfo, RecentUpdates, TrainingState, read_state
from mtrain.checkpoint.store.retention import Keep, Retention
from mtrain.config import Config
from mtrain.config.schema.model import ModelSection
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.engine.optimizer_state import MAIN, STATES
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.sharded_parameters import (
    ShardedParameter,
    base_parameters,
    checkpoint_parameters,
    optimizer_key,
    run_of,
    whole_of,
)
from mtrain.core.ranks import rng
from mtrain.core.ranks.groups import Groups, seed_generators
from mtrain.core.ranks.init import on_all_ranks, on_first_rank

OUTPUT = "output_layer.weight"
"""Key of the output layer, or of the head that replaces it."""
_TE_STATE = "._extra_state/"
"""Part of the keys of what TransformerEngine pickles with the weights; never read."""
_log = logging.getLogger(__name__)


class LoadedState(NamedTuple):
    step: int
    random_states_continue: bool
    """Whether random states continue; False on another layout, where the run's seed and the step seed them again."""
    recent: RecentUpdates | None
    """Recent updates, by which train.on_spike judges the next step."""


def save_checkpoint(
    folder: Path, model: RankModel, step: int, tokens: int = 0, inputs: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Makes one save, published when this returns, in the folder `checkpoints` of a run, which all ranks see.
    Collective over the world."""
    saver = Saver(model, Retention(folder, Keep.of(model.config.checkpoint)), Provenance(inputs=inputs))
    saver.save(step, tokens=tokens)
    saver.finish()


@torch.no_grad()
def load_checkpoint(entry: CheckpointEntry, model: RankModel) -> LoadedState:
    """Continues from a checkpoint of any layout. Collective over the world.

    On the layout that saved it, training continues bit for bit (on GPUs with train.deterministic). On another one
    weights and moments are the same bits and only the order of later sums differs.

    Raises:
        DataError: The checkpoint is damaged, would run code, or is of another model, precision or batch size. On all
            ranks; the model may be half overwritten.
    """
    chunks, optimizer, groups, config = model.chunks, model.optimizer, model.groups, model.config
    model.sharded.gather_parameters()  # a gather under way would overwrite what is loaded
    # Before the tensors are opened: a wrong batch size or precision should be reported as such, and not as a wrong
    # dtype of some tensor.
    base = base_of(model)
    state = on_first_rank(lambda: _resumable_state(entry, config, base))
    saved = on_all_ranks(lambda: CheckpointTensors(entry.path))
    # a GPU's generator has another kind of state
    is_same_layout = (state.layout, state.device) == (str(groups.layout), groups.device.type)
    # tensors hash by identity, so a parameter finds its own place
    places = {place.data: place for place in checkpoint_parameters([unwrap(chunk) for chunk in chunks], groups)}
    shards = [shard for place in places.values() for shard in whole_of(place, place.key, place.data)]
    # straight into the optimizer's own tensors, whatever dp cuts them into: no rank sees a whole state
    for flat_slice, states in optimizer.state.flat_slice_states():
        place = places[flat_slice.parameter]
        for name, values in states.items():
            shards += run_of(place, optimizer_key(name, place.key), values.view(-1), flat_slice.start, flat_slice.end)
    randomness = rng.random_states(groups)  # copies, filled from disk and set at the end
    # row r of a state of generators is rank r's: on another layout it has no owner
    if is_same_layout:
        for sharded in rng.sharded(randomness, groups):
            shards += whole_of(sharded, sharded.key, sharded.data)

    def may_be_left(key: str) -> bool:
        # any other key that no rank asks for means another model
        return _TE_STATE in key or (key.startswith(rng.PREFIX) and not is_same_layout)

    load_shards(saved, shards, may_be_left, state.vocab_size)
    # after the reading: states that `flat_slice_states` has just made count from 0
    optimizer.state.set_adam_step(state.adam_step)
    # without it fp16 would begin at the initial scale again and skip its first steps
    optimizer.state.set_loss_scaler(state.loss_scaler)
    if is_same_layout:
        rng.set_random_states(randomness)
    else:
        _reseed(state, groups, config)
    return LoadedState(state.step, is_same_layout, state.recent)


@torch.no_grad()
def load_weights(entry: CheckpointEntry, model: RankModel) -> None:
    """Starts from the weights of a checkpoint of any layout; moments and counters stay as they are. Collective over the
    world.

    Reads the float32 main weights if the checkpoint has them, whatever precision it and this run compute in, and fills
    the optimizer's.
    """
    model.sharded.gather_parameters()
    on_first_rank(lambda: _refuse_adapters(entry))
    # adapters are not part of a model that a run starts from
    places = base_parameters([unwrap(chunk) for chunk in model.chunks], model.groups)
    _read_weights(entry, places, model.config.model, filler_of(model.optimizer))


@torch.no_grad()
def load_adapters(entry: CheckpointEntry, model: RankModel) -> None:
    """Loads trained adapters onto the frozen model; the optimizer's moments stay. Collective."""
    model.sharded.gather_parameters()
    base = base_of(model)
    on_first_rank(lambda: check_base(entry.manifest, base, entry.path))
    places = checkpoint_parameters([unwrap(chunk) for chunk in model.chunks], model.groups)
    _read_weights(entry, places, model.config.model, filler_of(model.optimizer))


def fill(parameter: Tensor, values: Tensor) -> None:
    """Copies values into a parameter, rounded to its precision."""
    if parameter.data_ptr() != values.data_ptr():  # else they were read into it
        parameter.copy_(values)


def filler_of(optimizer: Optimizer) -> Callable[[Tensor, Tensor], None]:
    """Returns a function that fills a parameter, and the optimizer's main weights in the precision of the values."""
    updated = {flat_slice.parameter: flat_slice for flat_slice in optimizer.state.flat_slices()}

    def fill_both(parameter: Tensor, values: Tensor) -> None:
        fill(parameter, values)
        if parameter in updated:
            updated[parameter].set_main(values)  # from what was read, not from the parameter, which is rounded

    return fill_both


@torch.no_grad()
def load_frozen_weights(
    entry: CheckpointEntry, chunks: Sequence[torch.nn.Module], groups: Groups, model: ModelSection, main: bool = True
) -> None:
    """Fills a model without optimizer, as `load_weights` fills one with it. Collective over the world.

    Args:
        main: Whether to read the float32 main weights where they exist, rather than those that computed.
    """
    on_first_rank(lambda: _refuse_adapters(entry))
    places = base_parameters([unwrap(chunk) for chunk in chunks], groups)
    _read_weights(entry, places, model, fill, main)


def _read_weights(
    entry: CheckpointEntry,
    places: Sequence[ShardedParameter],
    model: ModelSection,
    use: Callable[[Tensor, Tensor], None],
    main: bool = True,
) -> None:
    on_first_rank(lambda: _read_state(entry, model))
    saved = on_all_ranks(lambda: CheckpointTensors(entry.path))
    naming = Naming(saved, main)
    read_weights(saved, places, model, naming.key_of, naming.may_be_left, use)


class Naming:
    """Names of the weights in a checkpoint."""

    def __init__(self, saved: GlobalTensors, main: bool) -> None:
        """Set `main` to read the float32 main weights where they exist."""
        self._saved, self._main = saved, main

    def key_of(self, key: str) -> str:
        """Returns the key on disk of a parameter's global name."""
        main_key = optimizer_key(MAIN, key)
        # half-precision weights are a rounding of the main weights, from which runs of any precision start alike
        return main_key if self._main and main_key in self._saved.tensors else key

    def may_be_left(self, key: str) -> bool:
        is_other = key.startswith(rng.PREFIX) or _TE_STATE in key
        # moments belong to the run that saved them; those of this run stay as they are
        is_state = any(key.startswith(optimizer_key(name, "")) for name in STATES if name != MAIN or not self._main)
        return is_other or is_state or (self._main and optimizer_key(MAIN, key) in self._saved.tensors)


def check_entry(entry: CheckpointEntry, model: ModelSection) -> None:
    """Compares a checkpoint's metadata with the run that starts from its weights."""
    _refuse_adapters(entry)
    _read_state(entry, model)


def read_weights(
    saved: GlobalTensors,
    places: Sequence[ShardedParameter],
    model: ModelSection,
    key_of: Callable[[str], str],
    may_be_left: Callable[[str], bool],
    use: Callable[[Tensor, Tensor], None],
) -> None:
    """Reads this rank's parameters, in the precision that they have on disk. Collective over the world.

    Args:
        places: Places of the wanted parameters of this rank.
        model: Section of the architecture; a head stays as drawn where the weights are those of a language model.
        key_of: Global name of a parameter -> key on disk.
        may_be_left: See `load_shards`.
        use: See `load_parameters`.
    """
    wanted: dict[Tensor, Wanted] = {}
    replaced = {OUTPUT, key_of(OUTPUT)} if _lacks_head(saved, key_of(OUTPUT), model) else set()
    for place in places:
        if place.key in replaced:
            continue
        key = key_of(place.key)
        # in the dtype on disk: load_shards compares dtypes, and rounding is left to the user of the values
        dtype = saved.tensors[key].dtype if key in saved.tensors else torch.float32
        values = memory_for(place.data, dtype)
        # whole parameters, although a distributed optimizer updates a part: all are needed to compute
        wanted[place.data] = Wanted(values, list(whole_of(place, key, values)))
    load_parameters(saved, wanted, lambda key: key in replaced or may_be_left(key), model.vocab_size, use)


def _lacks_head(saved: GlobalTensors, key: str, model: ModelSection) -> bool:
    """Says whether the model has a head and the weights are a language model's; reports it on the first rank."""
    if not model.output.is_new:
        return False
    there = saved.tensors.get(key)  # a tied table has no tensor of its own
    if there is not None and (there.shape[0] == model.output.rows or there.shape[0] < model.vocab_size):
        return False
    if dist.get_rank() == 0:
        _log.warning("%s has no head: that of %s starts random", saved.folder, model.output)
    return True


def _read_state(entry: CheckpointEntry, model: ModelSection) -> TrainingState:
    state = read_state(entry.path)
    if state.vocab_size != model.vocab_size:
        raise DataError(
            f"{entry.path} was saved with a vocabulary of {state.vocab_size}, but model.vocab_size is "
            f"{model.vocab_size}; set it as it was saved"
        )
    return state


def _refuse_adapters(entry: CheckpointEntry) -> None:
    if entry.manifest.base is not None:
        raise refused_as_model(entry.manifest.base, entry.path)


def _resumable_state(entry: CheckpointEntry, config: Config, base: BaseInfo | None) -> TrainingState:
    check_base(entry.manifest, base, entry.path)
    state = _read_state(entry, config.model)
    if state.step != entry.step:
        raise DataError(f"{entry.path / STATE_NAME} is of step {state.step}, but the checkpoint of step {entry.step}")
    # The order of samples is arithmetic on their count, so another batch size would skip or repeat some.
    if state.consumed_samples != state.step * config.train.global_batch_size:
        raise DataError(
            f"{entry.path} has seen {state.consumed_samples} samples in {state.step} steps, which does not fit "
            f"train.global_batch_size={config.train.global_batch_size}; set it as it was saved"
        )
    if (state.loss_scaler is not None) != (config.train.precision == "fp16"):
        raise DataError(
            f"{entry.path} was {'' if state.loss_scaler else 'not '}saved in fp16, but train.precision is "
            f"{config.train.precision}; set it as it was saved"
        )
    return state


def _reseed(state: TrainingState, groups: Groups, config: Config) -> None:
    # with the step: else dropout would repeat the run's first masks
    seed_generators(config.train.seed, state.step, groups)
    if groups.rank == 0 and config.dropout_keys:
        _log.warning(
            "the checkpoint was saved by %s on %s and continues on %s on %s: dropout draws from new seeds",
            *(state.layout, state.device, groups.layout, groups.device.type),
        )
