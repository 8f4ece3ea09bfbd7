"""What ranks do in tests of recomputation and of the memory estimate."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from mtrain.data.loader import StepLoader
from tests.core.offload.copies import Copies
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import Built, build, own_microbatches
from tests.plan.allocations import Allocations, LiveTensors, alive_bytes


class Measured(NamedTuple):
    """One step of one configuration on this rank."""

    gradients: dict[str, str]
    """Name of a parameter -> SHA-256 of its gradient's bytes."""
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    """Bytes of the optimizer's state between two steps."""
    forward_backward_bytes: int
    """Most bytes beyond those three while gradients are computed."""
    update_bytes: int
    """Most bytes beyond those three while the optimizer works."""
    host_bytes: int
    """Bytes moved to the host; with one microbatch per step, all at one time."""


def measured(groups: Groups, configs: Sequence[Config]) -> list[Measured]:
    """Measures second steps, since the first one allocates memory that stays."""
    return [_measured(groups, config) for config in configs]


def measured_with(groups: Groups, configs: Sequence[Config], batch: GlobalBatch) -> list[Measured]:
    """Measures steps on this batch."""
    return [_measured(groups, config, batch) for config in configs]


def _measured(groups: Groups, config: Config, batch: GlobalBatch | None = None) -> Measured:
    built = build(groups, config)
    loader = StepLoader(config, groups.dp_rank, groups.layout.dp) if groups.tp_rank == 0 else None
    for _ in range(2):
        if batch is not None:
            batches = own_microbatches(batch, groups, config)
        else:
            batches = None if loader is None else loader.batches(0)
        with Copies() as copies, Allocations() as forward:
            totals = built.training.forward_backward(batches)
        gradients = _gradients(built)
        with Allocations() as update:
            built.training.update(totals, config.optimizer.lr)
    weights = [parameter for chunk in built.model.chunks for parameter in chunk.parameters()]
    found = built.model.optimizer.state.flat_slice_states()
    states = [state for _, by_name in found for state in by_name.values()]
    return Measured(
        gradients,
        _size(weights),
        _size([*built.model.sharded.gradient_buffers()]),
        # in float32 the main weights are the weights
        _size([*weights, *states]) - _size(weights),
        forward.peak,
        update.peak,
        sum(copies.gone),
    )


class State(NamedTuple):
    """What a rank with divided weights holds in its second step, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    alive: int
    """Bytes of all tensors when gradients are known, beyond those before the model was built."""
    forward_backward_peak: int
    """Largest number of bytes beyond weights and optimizer while gradients are computed."""


def states(groups: Groups, configs: Sequence[Config]) -> list[State]:
    """Measures second steps, since the first one allocates memory that stays."""
    return [_state(groups, config) for config in configs]


def _state(groups: Groups, config: Config) -> State:
    before = alive_bytes()
    built = build(groups, config)
    loader = StepLoader(config, groups.dp_rank, groups.layout.dp) if groups.tp_rank == 0 else None
    for number in range(2):
        batches = None if loader is None else loader.batches(0)
        peak = LiveTensors()
        with peak if number else nullcontext():
            totals = built.training.forward_backward(batches)
        if number == 0:
            built.training.update(totals, config.optimizer.lr)
    del batches
    alive = alive_bytes() - before
    sharded: Any = built.model.sharded
    weights = [each.main for each in sharded._learning]
    moments = [state for _, by_name in built.model.optimizer.state.flat_slice_states() for state in by_name.values()]
    held = _size([*weights, *moments]) - _size(weights)
    return State(_size(weights), _size([*sharded.gradient_buffers()]), held, alive, peak.peak)


def _gradients(built: Built) -> dict[str, str]:
    named = (each for chunk in built.model.chunks for each in chunk.named_parameters())
    names: dict[Tensor, str] = {parameter: name for name, parameter in named}
    return {
        names[parameter]: hashlib.sha256(gradient.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for parameter, gradient in built.model.sharded.local_gradients()
    }


def _size(tensors: Sequence[Tensor]) -> int:
    """Returns the bytes of distinct storages."""
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())
