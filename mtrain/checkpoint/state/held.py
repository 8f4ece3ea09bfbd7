"""Copies the trained state to host memory and back, so that several models can share one frozen base.

A rank copies its own shards, so the layout does not matter, and ranks communicate only Adam's count of updates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from mtrain.core.engine.optimizer_state import MAIN
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.sharded_parameters import held_values
from mtrain.core.state.loss_scaler import LossScaler

HeldWeights: TypeAlias = list[Tensor]
"""Copies of this rank's trained parameters and buffers, without frozen parameters."""


@dataclass(frozen=True)
class HeldOptimizer:
    """Copy of this rank's part of the optimizer."""

    states: list[Tensor]
    adam_step: int
    loss_scaler: LossScaler | None


@torch.no_grad()
def held_weights(model: RankModel) -> HeldWeights:
    """Copies the trained weights. Collective if updated parameters have yet to be gathered."""
    model.sharded.gather_parameters()
    return [_copy(tensor) for tensor in _trained(model)]


@torch.no_grad()
def put_back_weights(saved: HeldWeights, model: RankModel) -> None:
    """Copies saved weights back into the model; the optimizer's main weights stay as they are."""
    model.sharded.gather_parameters()
    for parameter, value in zip(_trained(model), saved, strict=True):
        parameter.copy_(value)


@torch.no_grad()
def held_optimizer(model: RankModel) -> HeldOptimizer:
    """Copies the optimizer's state and main weights. One all-reduce of a number."""
    optimizer = model.optimizer.state
    states = [_copy(state) for _, state in _states(model)]
    return HeldOptimizer(states, optimizer.adam_step(), optimizer.loss_scaler())


@torch.no_grad()
def put_back_optimizer(saved: HeldOptimizer, model: RankModel) -> None:
    for (_, state), value in zip(_states(model), saved.states, strict=True):
        state.copy_(value)
    model.optimizer.state.set_adam_step(saved.adam_step)
    model.optimizer.state.set_loss_scaler(saved.loss_scaler)


@torch.no_grad()
def clear_optimizer(model: RankModel) -> None:
    """Resets the optimizer's moments and counts to 0; weights stay as they are."""
    for name, state in _states(model):
        if name != MAIN:
            state.zero_()
    model.optimizer.state.set_adam_step(0)


def held_gradients(model: RankModel) -> list[Tensor]:
    """Copies the accumulated gradients."""
    return [_copy(buffer) for buffer in model.sharded.gradient_buffers()]


def put_back_gradients(saved: list[Tensor], model: RankModel) -> None:
    for buffer, value in zip(model.sharded.gradient_buffers(), saved, strict=True):
        buffer.copy_(value)


def _trained(model: RankModel) -> Iterator[Tensor]:
    for chunk in model.chunks:
        module = unwrap(chunk)
        yield from (held_values(parameter) for parameter in module.parameters() if parameter.requires_grad)
        yield from module.buffers()


def _states(model: RankModel) -> Iterator[tuple[str, Tensor]]:
    for _, states in model.optimizer.state.flat_slice_states():
        yield from sorted(states.items())


def _copy(values: Tensor) -> Tensor:
    return values.detach().to("cpu", copy=True)
