"""What every rank does in a checkpoint test; the functions for `Pool.run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from mtrain.checkpoint.directory import load_entry, step_name
from mtrain.config import Config
from mtrain.data.loader import StepLoader
from mtrain.loss.terms import Objective
from mtrain.mcore.checkpoint import LoadedState, load_checkpoint, load_weights, save_checkpoint
from mtrain.mcore.gather import Shard, gather_whole, parameter_shards
from mtrain.mcore.groups import Groups
from mtrain.mcore.initialize import sharded_tensors
from mtrain.mcore.model import build_model, unwrap
from mtrain.mcore.optimizer import Optimizer
from mtrain.mcore.optimizer_state import adam_step, loss_scaler, portions, whole_states
from mtrain.mcore.spec import global_name
from mtrain.step import TrainingStep
from tests.crash import kill_self_before_operation

Arrays = dict[str, Any]
"""Tensors by name, as numpy: a torch tensor would travel between processes as an open file."""


class Step(NamedTuple):
    """One optimizer step."""

    loss: float
    grad_norm: float | None
    """None where the batch was empty; NaN where fp16 overflowed."""


class Standing(NamedTuple):
    """Everything that a rank continues from."""

    held: list[Arrays]
    """This rank's own part of each parameter's main weights, moments and step counter, as they lie in the optimizer."""
    adam_step: int
    loss_scaler: Any
    random_bytes: bytes
    """State of the generator that dropout draws from."""
    parameters: Arrays | None
    """Whole model weights by global name; on rank 0, else None."""
    main: Arrays | None
    """Whole float32 main weights, likewise."""
    moments: Arrays | None
    """Whole second moments, likewise."""


class Outcome(NamedTuple):
    """A run of a few steps."""

    steps: list[Step]
    begin: Standing
    end: Standing
    loaded: LoadedState | None


class Parts(NamedTuple):
    """A run on this rank."""

    chunks: list[Any]
    optimizer: Optimizer
    training: TrainingStep


def build(groups: Groups, config: Config) -> Parts:
    chunks = build_model(config, groups)
    optimizer = Optimizer(config, chunks, groups)
    return Parts(
        chunks, optimizer, TrainingStep(config, groups, chunks, optimizer, Objective.from_config(config.loss))
    )


def train(
    groups: Groups, config: Config, folder: Path, start: int, stop: int, save_at: int | None = None
) -> Outcome:
    """Loads the checkpoint of step `start` unless that is 0, and trains to `stop`; may save on the way."""
    parts, loaded = build(groups, config), None
    if start > 0:
        entry = load_entry(folder / step_name(start))
        loaded = load_checkpoint(entry, parts.chunks, parts.optimizer, groups, config)
    begin = standing(parts, groups)
    loader = StepLoader(config, groups.dp_rank, groups.layout.dp)
    steps = []
    for step in range(start, stop):
        if step == save_at:
            save_checkpoint(folder, parts.chunks, parts.optimizer, groups, config, step)
        totals = parts.training.forward_backward(loader.batches(step) if groups.tp_rank == 0 else None)
        update = parts.training.update(totals, config.optimizer.lr)
        steps.append(Step(totals.loss, None if update is None else update.grad_norm))
    parts.optimizer.gather_parameters()
    return Outcome(steps, begin, standing(parts, groups), loaded)


def start_from(groups: Groups, config: Config, folder: Path, step: int) -> Standing:
    """Takes the weights of a checkpoint into a new run."""
    parts = build(groups, config)
    load_weights(load_entry(folder / step_name(step)), parts.chunks, parts.optimizer, groups, config)
    return standing(parts, groups)


def standing(parts: Parts, groups: Groups) -> Standing:
    inner = parts.optimizer.inner
    states = {name: {} for name in ("param", "exp_avg", "exp_avg_sq")}
    held = []
    for part in inner.chained_optimizers:
        by_main = {id(main): state for main, state in part.optimizer.state.items()}
        for portion in portions(inner):
            state = by_main.get(id(portion.main), {})
            held.append({"main": _numpy(portion.main), **{name: _numpy(value) for name, value in state.items()}})
    for parameter, name, values in whole_states(inner, lambda parameter: True):
        states[name][parameter] = values
    return Standing(
        held,
        adam_step(inner),
        loss_scaler(inner),
        bytes(torch.get_rng_state().numpy()),
        _arrays(gather_whole(parameter_shards(parts.chunks, groups))),
        _arrays(gather_whole(_shards(parts, groups, states["param"]))),
        _arrays(gather_whole(_shards(parts, groups, states["exp_avg_sq"]))),
    )


def save_and_die(groups: Groups, config: Config, folder: Path, victim: int, operation: int) -> None:
    """One rank is killed in the middle of a save, before one of its operations with files of the checkpoints."""
    parts = build(groups, config)
    if groups.rank == victim:
        kill_self_before_operation(operation, folder)
    save_checkpoint(folder, parts.chunks, parts.optimizer, groups, config, 2)


def save_initial(groups: Groups, config: Config, folder: Path) -> None:
    """Saves before the first step."""
    parts = build(groups, config)
    save_checkpoint(folder, parts.chunks, parts.optimizer, groups, config, 1)


def load_error(groups: Groups, config: Config, folder: Path, step: int) -> tuple[str, str]:
    """Class and text of what loading raises on this rank."""
    parts = build(groups, config)
    return _raised(
        lambda: load_checkpoint(
            load_entry(folder / step_name(step)), parts.chunks, parts.optimizer, groups, config
        )
    )


def save_error(groups: Groups, config: Config, folder: Path) -> tuple[str, str]:
    """Class and text of what saving raises on this rank."""
    parts = build(groups, config)
    return _raised(lambda: save_checkpoint(folder, parts.chunks, parts.optimizer, groups, config, 2))


def _raised(action: Any) -> tuple[str, str]:
    try:
        action()
    except Exception as fault:
        return type(fault).__name__, str(fault)
    return "nothing", ""


def _shards(parts: Parts, groups: Groups, values: dict[torch.Tensor, torch.Tensor]) -> list[Shard]:
    shards = []
    for chunk in parts.chunks:
        for part in sharded_tensors(unwrap(chunk), groups, lambda parameter: values[parameter]):
            axes = part.prepend_axis_num
            name = global_name(part.key, tuple(part.global_offset[:axes]))
            shards.append(
                Shard(name, tuple(part.global_shape[axes:]), tuple(part.global_offset[axes:]), part.data.clone())
            )
    return shards


def _arrays(tensors: dict[str, torch.Tensor] | None) -> Arrays | None:
    return None if tensors is None else {name: _numpy(tensor) for name, tensor in tensors.items()}


def _numpy(tensor: torch.Tensor) -> Any:
    return tensor.detach().float().numpy().copy()
