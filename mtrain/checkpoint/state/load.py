"""Saves training state, resumes it on the same or another layout, and starts runs from other weights.

Under names that do not depend on the layout, a checkpoint contains the model's weights (`decoder...`), float32 main
weights and Adam's moments (`optimizer.state.{param,exp_avg,exp_avg_sq}.decoder...`), and each rank's random states
(`rng...`); training_state.json has the counters.
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
from mtrain.base.spelling import counted
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.state.base import base_of, check_base, refused_as_model
from mtrain.checkpoint.state.reader import GlobalTensors, ReadTarget, load_parameters, load_shards, target_of
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
    held_of,
    held_rows,
    held_values,
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
"""Part of the keys of TransformerEngine's pickled state, which is never read."""
_log = logging.getLogger(__name__)


class LoadedState(NamedTuple):
    step: int
    random_states_continue: bool
    """Whether random states continue; on another layout, run seed and step seed them anew."""
    recent: RecentUpdates | None
    """Recent updates that train.on_spike compares with the next step."""


def save_checkpoint(
    folder: Path, model: RankModel, step: int, tokens: int = 0, inputs: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Saves one checkpoint into a run's folder `checkpoints`, which all ranks see, and publishes it before it returns.
    Collective over the world."""
    saver = Saver(model, Retention(folder, Keep.of(model.config.checkpoint)), Provenance(inputs=inputs))
    saver.save(step, tokens=tokens)
    saver.finish()


@torch.no_grad()
def load_checkpoint(entry: CheckpointEntry, model: RankModel) -> LoadedState:
    """Resumes from a checkpoint of any layout. Collective over the world.

    On the layout that saved it, training continues bit for bit (on GPUs with train.deterministic). On another layout,
    weights and moments have the same bits, and only the order of later sums differs.

    Raises:
        DataError: The checkpoint is damaged, would run code, or has another model, precision or batch size. Raised on
            all ranks; the model may be half overwritten.
    """
    chunks, optimizer, groups, config = model.chunks, model.optimizer, model.groups, model.config
    model.sharded.gather_parameters()  # a gather in flight would overwrite the loaded values
    # before the tensors, so that a wrong batch size or precision is reported as such, not as some tensor's wrong dtype
    base = base_of(model)
    state = on_first_rank(lambda: _resumable_state(entry, config, base))
    saved = on_all_ranks(lambda: CheckpointTensors(entry.path))
    # a GPU's generator has another kind of state than a CPU's
    saved_by, here = (layout.removesuffix("-weights") for layout in (state.layout, str(groups.layout)))
    is_same_layout = (saved_by, state.device) == (here, groups.device.type)  # `shard` moves no rank
    # tensors hash by identity, so a dict finds the sharding of a parameter
    parameters = {
        parameter.data: parameter for parameter in checkpoint_parameters([unwrap(chunk) for chunk in chunks], groups)
    }
    shards = [shard for parameter in parameters.values() for shard in held_of(parameter)]
    # straight into the optimizer's tensors, however dp has cut them, so that no rank needs a whole state
    for flat_slice, states in optimizer.state.flat_slice_states():
        parameter = parameters[flat_slice.parameter]
        for name, values in states.items():
            shards += run_of(
                parameter, optimizer_key(name, parameter.key), values.view(-1), flat_slice.start, flat_slice.end
            )
    randomness = rng.random_states(groups)  # copies, which are filled from disk and set at the end
    # row r of the generators' states belongs to rank r, so it has no owner on another layout
    if is_same_layout:
        for sharded in rng.sharded(randomness, groups):
            shards += whole_of(sharded, sharded.key, sharded.data)

    def may_be_left(key: str) -> bool:
        # any other key that no rank needs belongs to another model
        return _TE_STATE in key or (key.startswith(rng.PREFIX) and not is_same_layout)

    load_shards(saved, shards, may_be_left, state.vocab_size)
    # after the reading, because `flat_slice_states` creates missing states with a count of 0
    optimizer.state.set_adam_step(state.adam_step)
    # without it, fp16 would restart at the initial scale and skip its first steps
    optimizer.state.set_loss_scaler(state.loss_scaler)
    if is_same_layout:
        rng.set_random_states(randomness)
    else:
        _reseed(state, groups, config)
    return LoadedState(state.step, is_same_layout, state.recent)


@torch.no_grad()
def load_weights(entry: CheckpointEntry, model: RankModel) -> None:
    """Starts from the weights of a checkpoint of any layout; moments and counters stay as they are.

    Collective over the world. Reads the float32 main weights if the checkpoint has them, whatever precision it and this
    run compute in, and fills the optimizer's.
    """
    model.sharded.gather_parameters()
    on_first_rank(lambda: _refuse_adapters(entry))
    # a run starts from a model without adapters
    parameters = base_parameters([unwrap(chunk) for chunk in model.chunks], model.groups)
    _read_weights(entry, parameters, model.config.model, filler_of(model.optimizer))


@torch.no_grad()
def load_adapters(entry: CheckpointEntry, model: RankModel) -> None:
    """Loads trained adapters onto the frozen model; the optimizer's moments stay. Collective."""
    model.sharded.gather_parameters()
    base = base_of(model)
    on_first_rank(lambda: check_base(entry.manifest, base, entry.path))
    parameters = checkpoint_parameters([unwrap(chunk) for chunk in model.chunks], model.groups)
    _read_weights(entry, parameters, model.config.model, filler_of(model.optimizer))


def fill(parameter: Tensor, values: Tensor) -> None:
    """Copies values into a parameter, rounded to its precision; see `target_of`."""
    held = held_values(parameter)
    if held.data_ptr() != values.data_ptr():  # else the values were read into the parameter
        held.copy_(values)


def filler_of(optimizer: Optimizer) -> Callable[[Tensor, Tensor], None]:
    """Returns a function that fills a parameter, and its main weights in the precision of the values."""
    updated = {flat_slice.parameter: flat_slice for flat_slice in optimizer.state.flat_slices()}

    def fill_both(parameter: Tensor, values: Tensor) -> None:
        fill(parameter, values)
        if parameter in updated and held_rows(parameter) is None:  # else these are the main weights
            updated[parameter].set_main(values)  # not from the parameter, which is rounded

    return fill_both


@torch.no_grad()
def load_frozen_weights(
    entry: CheckpointEntry, chunks: Sequence[torch.nn.Module], groups: Groups, model: ModelSection, main: bool = True
) -> None:
    """Fills a model that has no optimizer, like `load_weights`. Collective over the world.

    Args:
        main: Whether to read the float32 main weights if they exist, or else the model's weights.
    """
    on_first_rank(lambda: _refuse_adapters(entry))
    parameters = base_parameters([unwrap(chunk) for chunk in chunks], groups)
    _read_weights(entry, parameters, model, fill, main)


def _read_weights(
    entry: CheckpointEntry,
    parameters: Sequence[ShardedParameter],
    model: ModelSection,
    use: Callable[[Tensor, Tensor], None],
    main: bool = True,
) -> None:
    on_first_rank(lambda: _read_state(entry, model))
    saved = on_all_ranks(lambda: CheckpointTensors(entry.path))
    naming = Naming(saved, main)
    read_weights(saved, parameters, model, naming.key_of, naming.may_be_left, use)


class Naming:
    """Names of the weights in a checkpoint."""

    def __init__(self, saved: GlobalTensors, main: bool) -> None:
        """`main` prefers the float32 main weights if they exist."""
        self._saved, self._main = saved, main

    def key_of(self, key: str) -> str:
        """Converts a parameter's global name to its key on disk."""
        main_key = optimizer_key(MAIN, key)
        # half-precision weights are rounded main weights; runs of any precision start from the same numbers
        return main_key if self._main and main_key in self._saved.tensors else key

    def may_be_left(self, key: str) -> bool:
        """Returns whether a start from weights may leave a key unread."""
        is_other = key.startswith(rng.PREFIX) or _TE_STATE in key
        # moments belong to the run that saved them; those of this run stay as they are
        is_state = any(key.startswith(optimizer_key(name, "")) for name in STATES if name != MAIN or not self._main)
        return is_other or is_state or (self._main and optimizer_key(MAIN, key) in self._saved.tensors)


def check_entry(entry: CheckpointEntry, model: ModelSection) -> None:
    """Checks that a run can start from the checkpoint's weights: no adapters, and the same vocabulary."""
    _refuse_adapters(entry)
    _read_state(entry, model)


def read_weights(
    saved: GlobalTensors,
    parameters: Sequence[ShardedParameter],
    model: ModelSection,
    key_of: Callable[[str], str],
    may_be_left: Callable[[str], bool],
    use: Callable[[Tensor, Tensor], None],
) -> None:
    """Reads this rank's parameters, in their precision on disk. Collective over the world.

    Args:
        parameters: This rank's parameters to read.
        model: Architecture; a new head keeps its random weights if the checkpoint is of a language model.
        key_of: Global name of a parameter -> key on disk.
        may_be_left: See `load_shards`.
        use: See `load_parameters`.
    """
    targets: dict[Tensor, ReadTarget] = {}
    replaced = {OUTPUT, key_of(OUTPUT)} if _lacks_head(saved, key_of(OUTPUT), model) else set()
    for parameter in parameters:
        if parameter.key in replaced:
            continue
        key = key_of(parameter.key)
        # in the dtype on disk, because load_shards compares dtypes; `use` rounds
        dtype = saved.tensors[key].dtype if key in saved.tensors else torch.float32
        targets[parameter.data] = target_of(parameter, key, dtype)
    load_parameters(saved, targets, lambda key: key in replaced or may_be_left(key), model.vocab_size, use)


def _lacks_head(saved: GlobalTensors, key: str, model: ModelSection) -> bool:
    """Returns whether the model has a head and the weights are a language model's; logs it on the first rank."""
    if not model.output.is_new:
        return False
    saved_head = saved.tensors.get(key)  # None if the output layer is tied
    if saved_head is not None and (saved_head.shape[0] == model.output.rows or saved_head.shape[0] < model.vocab_size):
        return False
    if dist.get_rank() == 0:
        _log.warning("%s has no head: the head of %s starts random", saved.folder, model.output)
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
        raise DataError(f"{entry.path / STATE_NAME} has step {state.step}, but the checkpoint has step {entry.step}")
    # the count of samples determines their order, so another batch size would skip or repeat some
    if state.consumed_samples != state.step * config.train.global_batch_size:
        raise DataError(
            f"{entry.path} has seen {counted(state.consumed_samples, 'sample')} in {counted(state.step, 'step')}, "
            f"which does not fit train.global_batch_size={config.train.global_batch_size}; set it as it was saved"
        )
    if (state.loss_scaler is not None) != (config.train.precision == "fp16"):
        raise DataError(
            f"{entry.path} was {'' if state.loss_scaler else 'not '}saved in fp16, but train.precision is "
            f"{config.train.precision}; set it as it was saved"
        )
    return state


def _reseed(state: TrainingState, groups: Groups, config: Config) -> None:
    # with the step, or dropout would repeat the run's first masks
    seed_generators(config.train.seed, state.step, groups)
    if groups.rank == 0 and config.dropout_keys:
        _log.warning(
            "the checkpoint was saved by %s on %s and continues on %s on %s: dropout draws from new seeds",
            *(state.layout, state.device, groups.layout, groups.device.type),
        )
