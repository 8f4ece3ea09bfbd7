"""Faults of megatron-core's optimizer and checkpoints and our replacements; the functions for `Pool.run`."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch import Tensor

from mtrain.config import Config
from mtrain.core.engine.optimizer_state import MAIN, STATES
from mtrain.core.layers.build import unwrap
from mtrain.core.ranks.groups import Groups
from mtrain.data.loader import StepLoader
from mtrain.runs.folder import RunFolder
from mtrain.training.build import build_run
from tests.core.state.checkpoint_ranks import Parts, build
from tests.core.state.whole_states import whole_states


def save_by_megatron(groups: Groups, folder: Path) -> str:
    """Returns how their save ends in a process that may not start others."""
    shard = ShardedTensor.from_rank_offsets("weight", torch.ones(2))
    try:
        dist_checkpointing.save({"weight": shard}, str(folder))
    except AssertionError as error:
        return str(error)
    return ""


def adam_steps(groups: Groups, config: Config) -> dict[str, set[int]]:
    """Returns Adam's count of updates of each parameter: after an update, a load and another update."""
    found = {}
    for name in ("theirs", "ours"):
        parts = build(groups, config)
        part = parts.model.optimizer.inner.chained_optimizers[0]
        update(parts, groups, config)
        if name == "theirs":
            part.load_state_dict(part.state_dict())
        else:
            parts.model.optimizer.state.set_adam_step(1)
        update(parts, groups, config)
        found[name] = {int(state["step"]) for state in part.optimizer.state.values()}
    return found


def update(parts: Parts, groups: Groups, config: Config) -> float:
    """Runs one training step on the mock data; returns the norm of the gradients."""
    totals = parts.training.forward_backward(StepLoader(config, groups.dp_rank, groups.layout.dp).batches(0))
    done = parts.training.update(totals, config.optimizer.lr)
    assert done is not None
    return done.grad_norm


def states_before_the_first_update(groups: Groups, config: Config) -> tuple[bool, int]:
    """Says whether their optimizer can return its state before its first step, and what Adam counts after our load."""
    parts = build(groups, config)
    try:
        parts.model.optimizer.inner.chained_optimizers[0].state_dict()
    except AssertionError:
        can_tell = False
    else:
        can_tell = True
    assert all(states.keys() == set(STATES) for _, states in parts.model.optimizer.state.flat_slice_states())
    parts.model.optimizer.state.set_adam_step(7)
    return can_tell, parts.model.optimizer.state.adam_step()


def updated_parameters(parts: Parts) -> list[Tensor]:
    """Returns the parameters that this rank updates."""
    return [flat_slice.parameter for flat_slice in parts.model.optimizer.state.flat_slices()]


def set_one_state(groups: Groups, config: Config) -> str:
    """Returns how their loop ends that loads a checkpoint's state into torch's Adam."""
    parts = build(groups, config)
    update(parts, groups, config)
    part = parts.model.optimizer.inner.chained_optimizers[0]
    parameter = updated_parameters(parts)[0]
    held = part._get_main_param_and_optimizer_states(parameter)
    try:
        with torch.no_grad():
            part._set_main_param_and_optimizer_states(parameter, {key: held[key] for key in STATES})
    except KeyError as error:
        return str(error)
    return ""


def save_without_metadata(groups: Groups, config: Config) -> str:
    """Returns how their optimizer's default form of a checkpoint ends."""
    parts = build(groups, config)
    update(parts, groups, config)
    part = parts.model.optimizer.inner.chained_optimizers[0]
    try:
        part.sharded_state_dict(unwrap(parts.model.chunks[0]).sharded_state_dict())
    except (CheckpointingException, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shifted_states(groups: Groups, config: Config) -> tuple[int, int]:
    """Counts parameters whose gathered main weights differ from the model's: with theirs, with ours."""
    parts = build(groups, config)
    update(parts, groups, config)
    part, wrong = parts.model.optimizer.inner.chained_optimizers[0], 0
    gathered = part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    for number, buffer in enumerate(part.buffers):
        ((_, world),) = gathered[number].items()
        for parameter, (start, end, _) in buffer.param_index_map.items():
            wrong += not torch.equal(world["param"][start:end], parameter.detach().flatten())
    states = whole_states(parts.model)
    return wrong, sum(not torch.equal(values, one.detach()) for one, name, values in states if name == MAIN)


def norms_without_clipping(groups: Groups, config: Config) -> tuple[float | None, float]:
    """Returns the norm of the gradients that a bare optimizer of theirs reports, and ours."""
    parts = build(groups, config)
    ours = update(parts, groups, config)
    _, theirs, _ = parts.model.optimizer.inner.chained_optimizers[0].step()
    return theirs, ours


def clipped_norm(groups: Groups, config: Config) -> float:
    """Returns the norm of the gradients that Adam gets."""
    parts = build(groups, config)
    update(parts, groups, config)
    return float(parts.model.optimizer.inner.get_grad_norm())


def first_loss(groups: Groups, config: Config) -> float:
    """Returns the loss of the first step."""
    parts = build(groups, config)
    batches = StepLoader(config, groups.dp_rank, groups.layout.dp).batches(0) if groups.tp_rank == 0 else None
    return parts.training.forward_backward(batches).loss


def said_at_the_start(groups: Groups, config: Config, folder: Path) -> str:
    """Returns what building a run prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        build_run(config, groups, RunFolder(folder))
    return said.getvalue()
