"""What every rank does in a checkpoint test; the functions for `Pool.run`."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from mtrain.base.errors import MtrainError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.format.safe_metadata import read_metadata
from mtrain.checkpoint.state.gather import parameter_shards
from mtrain.checkpoint.state.load import LoadedState, load_checkpoint, load_weights, save_checkpoint
from mtrain.checkpoint.state.save import Saver
from mtrain.checkpoint.store.directory import load_entry, newest_good
from mtrain.checkpoint.store.retention import Keep, Retention
from mtrain.checkpoint.store.steps import step_name
from mtrain.config import Config
from mtrain.core.engine.rank_model import RankModel, build_rank_model
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.init_weights import sharded_tensors
from mtrain.core.layers.layer_spec import global_name
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.groups import Groups
from mtrain.core.state.loss_scaler import LossScaler
from mtrain.core.state.shard import Shard
from mtrain.core.step.step import TrainingStep
from mtrain.data.loader import StepLoader
from tests.base.crash import kill_self_before_operation
from tests.core.state.gathering import gather_whole
from tests.core.state.whole_states import whole_states

Arrays = dict[str, Any]
"""Tensors by name, as numpy: a torch tensor would travel between processes as an open file."""


class Step(NamedTuple):
    """One optimizer step."""

    loss: float
    grad_norm: float
    """NaN where fp16 overflowed."""


class Standing(NamedTuple):
    """The state that a rank continues from."""

    parameters: list[Any]
    """This rank's model weights."""
    held: list[Arrays]
    """This rank's part of each parameter's main weights, moments and step counter, as they lie in the optimizer."""
    adam_step: int
    loss_scaler: LossScaler | None
    random_bytes: bytes
    """State of the generator that dropout draws from."""


class Whole(NamedTuple):
    """The model of all ranks together, by global name; on rank 0, else empty."""

    parameters: Arrays
    main: Arrays
    """Float32 main weights."""
    moments: Arrays
    """Second moments."""


class Outcome(NamedTuple):
    """A run of a few steps."""

    steps: list[Step]
    begin: Standing
    end: Standing
    loaded: LoadedState | None
    """State that a resumed run loaded."""
    saved: Standing | None
    """State when a checkpoint was saved, if one was."""
    whole: dict[str, Whole]
    """Whole model at "begin", "save" and "end", if asked for."""


class Parts(NamedTuple):
    """A model ready to train on this rank."""

    model: RankModel
    training: TrainingStep


def in_few_passes(config: Config, groups: Groups) -> Config:
    """Returns the configuration with the largest microbatches that fill the pipeline; each pass costs the same."""
    layout = groups.layout
    size = max(1, config.train.global_batch_size // layout.dp // layout.pp)
    return config.model_copy(update={"train": config.train.model_copy(update={"micro_batch_size": size})})


def build(groups: Groups, config: Config) -> Parts:
    """Builds model, optimizer and step on the initial weights."""
    model = build_rank_model(config, groups)
    return Parts(model, TrainingStep(model, Objective.from_config(config.loss, config.model)))


def train(
    groups: Groups,
    config: Config,
    folder: Path,
    resume_at: int | None,
    stop: int,
    save_at: int | None = None,
    gathered_at: Collection[str] = (),
) -> Outcome:
    """Trains from the start, or from the checkpoint of a step, until `stop` steps are done; may save on the way.

    Args:
        groups: Process groups of this rank.
        config: Configuration of the run.
        folder: Folder of the run's checkpoints.
        resume_at: Step of the checkpoint to resume; None starts anew.
        stop: Number of steps in all.
        save_at: Step before which a checkpoint is saved, or the last step plus one.
        gathered_at: Moments at which the whole model is gathered: "begin", "save", "end".
    """
    config = in_few_passes(config, groups)
    parts, loaded, saved = build(groups, config), None, None
    if resume_at is not None:
        loaded = load_checkpoint(_entry(folder, resume_at), parts.model)
    begin, wholes = standing(parts), {"begin": whole(parts, groups)} if "begin" in gathered_at else {}
    loader = StepLoader(config, groups.dp_rank, groups.layout.dp)
    steps = []
    for step in range(resume_at or 0, stop + 1):
        if step == save_at:
            save_checkpoint(folder, parts.model, step)
            saved = standing(parts)
            wholes |= {"save": whole(parts, groups)} if "save" in gathered_at else {}
        if step == stop:
            break
        totals = parts.training.forward_backward(loader.batches(step) if groups.tp_rank == 0 else None)
        update = parts.training.update(totals, config.optimizer.lr)
        assert update is not None
        steps.append(Step(totals.loss, update.grad_norm))
    parts.model.sharded.gather_parameters()
    wholes |= {"end": whole(parts, groups)} if "end" in gathered_at else {}
    return Outcome(steps, begin, standing(parts), loaded, saved, wholes)


def train_and_resume(
    groups: Groups, config: Config, folder: Path, stop: int, save_at: int, gathered_at: Collection[str] = ()
) -> tuple[Outcome, Outcome]:
    """Makes a run that saves on its way, and another, built anew on the same ranks, that resumes there."""
    straight = train(groups, config, folder, None, stop, save_at, gathered_at)
    return straight, train(groups, config, folder, save_at, stop)


def begin_and_resume(groups: Groups, config: Config, folder: Path, stop: int, saved_at: int) -> tuple[Outcome, Outcome]:
    """Builds a run before its first step, and another that resumes at a checkpoint; gathers the model at each start."""
    fresh = train(groups, config, folder, None, 0, None, ["begin"])
    return fresh, train(groups, config, folder, saved_at, stop, None, ["begin"])


def resumed_at(groups: Groups, config: Config, folder: Path, steps: Sequence[int]) -> list[Outcome]:
    """Resumes runs at some checkpoints, one after the other, without any step."""
    return [train(groups, config, folder, step, step) for step in steps]


class Started(NamedTuple):
    """A new run from the weights of a checkpoint."""

    adam_step: int
    begun: Whole
    num_read: int
    """Elements that this rank read."""


def start_from(groups: Groups, configs: Sequence[Config], folder: Path, step: int) -> list[Started]:
    """Starts new runs from the weights of a checkpoint."""
    found = []
    for config in configs:
        parts = build(groups, config)
        with mock.patch.object(CheckpointTensors, "read", autospec=True, side_effect=CheckpointTensors.read) as read:
            load_weights(_entry(folder, step), parts.model)
        num_read = sum(call.args[2].num_elements for call in read.call_args_list)
        found.append(Started(parts.model.optimizer.state.adam_step(), whole(parts, groups), num_read))
    return found


def save(groups: Groups, config: Config, folder: Path, steps: Sequence[int]) -> None:
    """Saves the initial weights under several step numbers; all of them count as good."""
    parts = build(groups, config)
    saver = Saver(parts.model, Retention(folder, Keep.of(config.checkpoint)))
    for step in steps:
        saver.confirm(step)
        saver.save(step)
        saver.finish()


def save_and_die(groups: Groups, config: Config, folder: Path, step: int, victim: int, operation: int) -> None:
    """Kills one rank in the middle of a save, before one of its file operations on the checkpoints."""
    parts = build(groups, config)
    if groups.rank == victim:
        kill_self_before_operation(operation, folder)
    save_checkpoint(folder, parts.model, step)


def save_without_psutil(groups: Groups, config: Config, folder: Path) -> int:
    """Saves where psutil cannot be imported; returns the number of processes that this started and left."""
    parts = build(groups, config)
    sys.modules["psutil"] = None  # type: ignore[assignment]
    save_checkpoint(folder, parts.model, 1)
    sys.modules["psutil"] = psutil
    return len(psutil.Process().children(recursive=True))


def save_on_full_disk(groups: Groups, config: Config, folder: Path, victim: int) -> tuple[str, str]:
    """Returns class and text of the error that saving raises on this rank when one rank's files may not grow."""
    parts = build(groups, config)
    if groups.rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    return _raised(lambda: save_checkpoint(folder, parts.model, 2))


def save_error(groups: Groups, config: Config, folder: Path, step: int) -> tuple[str, str]:
    """Returns class and text of the error that saving raises on this rank."""
    parts = build(groups, config)
    return _raised(lambda: save_checkpoint(folder, parts.model, step))


def load_errors(groups: Groups, cases: Sequence[tuple[Config, Path]]) -> list[tuple[str, str]]:
    """Returns class and text of the error that loading raises on this rank, for each configuration and folder."""
    return [_load_error(groups, config, folder) for config, folder in cases]


def _load_error(groups: Groups, config: Config, folder: Path) -> tuple[str, str]:
    parts = build(groups, config)
    (path,) = folder.glob("step_*")
    return _raised(lambda: load_checkpoint(load_entry(path), parts.model))


def read_by_megatron(groups: Groups, folder: Path, step: int) -> Arrays:
    """Returns global tensors by checkpoint key, as megatron-core's own loader reads them."""
    path = folder / step_name(step)
    # not its load_plain_tensors: with torch 2.15 its own listing of the tensors fails
    wanted = {
        key: ShardedTensor.from_rank_offsets(
            key, torch.empty(facts.shape, dtype=facts.dtype, device="meta")
        ).without_data()
        for key, facts in read_metadata(path).tensors.items()
    }
    return _arrays(dist_checkpointing.load(wanted, str(path), validate_access_integrity=False))


def standing(parts: Parts) -> Standing:
    """Returns the state that this rank would continue from."""
    inner, state = parts.model.optimizer.inner, parts.model.optimizer.state
    held = []
    for part in inner.chained_optimizers:
        state_of = {id(main): state for main, state in part.optimizer.state.items()}
        held += [_arrays({"main": main, **state_of.get(id(main), {})}) for _, main, *_ in state.flat_slices()]
    parameters = [_numpy(shard.data) for shard in parameter_shards(parts.model.chunks, parts.model.groups)]
    random_bytes = bytes(torch.get_rng_state().numpy())
    return Standing(parameters, held, state.adam_step(), state.loss_scaler(), random_bytes)


def whole(parts: Parts, groups: Groups) -> Whole:
    """Gathers the whole model."""
    states: dict[str, dict[Tensor, Tensor]] = {"param": {}, "exp_avg_sq": {}}  # a stage may train nothing
    for parameter, name, values in whole_states(parts.model):
        states.setdefault(name, {})[parameter] = values
    return Whole(
        _arrays(gather_whole(parameter_shards(parts.model.chunks, groups))),
        _arrays(gather_whole(_shards(parts, groups, states["param"]))),
        _arrays(gather_whole(_shards(parts, groups, states["exp_avg_sq"]))),
    )


def _entry(folder: Path, step: int) -> Any:
    return load_entry(folder / step_name(step))


def _raised(action: Callable[[], Any]) -> tuple[str, str]:
    try:
        action()
    except MtrainError as fault:
        return type(fault).__name__, str(fault)
    return "nothing", ""


def _shards(parts: Parts, groups: Groups, values: Mapping[Tensor, Tensor]) -> list[Shard]:
    shards = []
    for chunk in parts.model.chunks:
        for part in sharded_tensors(unwrap(chunk), groups, values.get):
            axes = part.prepend_axis_num
            name = global_name(part.key, tuple(part.global_offset[:axes]))
            shape, offset = tuple(part.global_shape[axes:]), tuple(part.global_offset[axes:])
            at = TensorSlice(offset, tuple(part.data.shape))
            shards.append(Shard(name, shape, at, part.data.clone()))
    return shards


def _arrays(tensors: Mapping[str, Tensor] | None) -> Arrays:
    return {name: _numpy(tensor) for name, tensor in (tensors or {}).items()}


def _numpy(tensor: Tensor) -> Any:
    return tensor.detach().float().numpy().copy()


def newest_step(root: Path) -> int:
    """Returns the step of the newest whole checkpoint."""
    entry = newest_good(root).entry
    assert entry is not None
    return entry.step
