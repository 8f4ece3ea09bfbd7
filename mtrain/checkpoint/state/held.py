"""Copies of what training changes, in the host's memory, so that several models can share one frozen base.

A rank holds its own shards, so the layout plays no role and nothing is communicated but Adam's count of updates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from mtrain.core.engine.optimizer_state import MAIN
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.layers.build import unwrap
from mtrain.core.state.loss_scaler import LossScaler

HeldWeights: TypeAlias = list[Tensor]
"""What this rank's trained parameters and buffers were; frozen parameters are not copied."""


@dataclass(frozen=True)
class HeldOptimizer:
    """What this rank's part of the optimizer was."""

    states: list[Tensor]
    adam_step: int
    loss_scaler: LossScaler | None


@torch.no_grad()
def held_weights(model: RankModel) -> HeldWeights:
    """Copies the trained weights. Collective, where updated parameters still have to be gathered."""
    model.sharded.gather_parameters()
    return [_copy(each) for each in _trained(model)]


@torch.no_grad()
def put_back_weights(held: HeldWeights, model: RankModel) -> None:
    """Makes the model compute with held weights; the optimizer's main weights stay as they are."""
    model.sharded.gather_parameters()
    for parameter, value in zip(_trained(model), held, strict=True):
        parameter.copy_(value)


@torch.no_grad()
def held_optimizer(model: RankModel) -> HeldOptimizer:
    """Copies the optimizer's state with its main weights. One all-reduce of a number."""
    optimizer = model.optimizer.state
    states = [_copy(each) for _, each in _states(model)]
    return HeldOptimizer(states, optimizer.adam_step(), optimizer.loss_scaler())


@torch.no_grad()
def put_back_optimizer(held: HeldOptimizer, model: RankModel) -> None:
    for (_, state), value in zip(_states(model), held.states, strict=True):
        state.copy_(value)
    model.optimizer.state.set_adam_step(held.adam_step)
    model.optimizer.state.set_loss_scaler(held.loss_scaler)


@torch.no_grad()
def clear_optimizer(model: RankModel) -> None:
    """Sets the optimizer back to its beginning at the weights as they are: moments and counts of 0."""
    for name, state in _states(model):
        if name != MAIN:
            state.zero_()
    model.optimizer.state.set_adam_step(0)


def held_gradients(model: RankModel) -> list[Tensor]:
    """Copies the accumulated gradients."""
    return [_copy(each) for each in model.sharded.gradient_buffers()]


def put_back_gradients(held: list[Tensor], model: RankModel) -> None:
    for buffer, value in zip(model.sharded.gradient_buffers(), held, strict=True):
        buffer.copy_(value)


def _trained(model: RankModel) -> Iterator[Tensor]:
    for chunk in model.chunks:
        module = unwrap(chunk)
        yield from (parameter for parameter in module.parameters() if parameter.requires_grad)
        yield from module.buffers()


def _states(model: RankModel) -> Iterator[tuple[str, Tensor]]:
    for _, states in model.optimizer.state.flat_slice_states():
        yield from sorted(states.items())


def _copy(values: Tensor) -> Tensor:
    return values.detach().to("cpu", copy=True)
