"""What every rank does in a test of Muon; the functions for `Pool.run`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mtrain.config import Config
from mtrain.core.engine.optimizer_state import MAIN
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.sharded_parameters import sharded_parameters
from mtrain.core.ranks.groups import Groups
from mtrain.data.loader import StepLoader
from tests.core.state.checkpoint_ranks import Parts, build


class Share(NamedTuple):
    """The optimizer state that a rank keeps."""

    momenta: int
    """Number of elements that have a momentum alone."""
    moments: int
    """Number of elements that have both moments."""
    names: frozenset[str]
    """Checkpoint keys of the parameters with moments, without layer numbers."""


class Skipped(NamedTuple):
    """An fp16 update that overflowed."""

    overflowed: bool
    largest_momentum: float
    moved: bool
    """Whether a main weight has changed."""


def share(groups: Groups, config: Config) -> Share:
    """Counts the state of a newly built optimizer."""
    parts = build(groups, config)
    keys = {place.data: place.key for place in sharded_parameters(map(unwrap, parts.model.chunks), groups)}
    counts, names = {True: 0, False: 0}, set()
    for flat_slice, states in parts.model.optimizer.state.flat_slice_states():
        is_alone = "exp_avg_sq" not in states
        counts[is_alone] += states["exp_avg"].numel()
        names |= set() if is_alone else {keys[flat_slice.parameter].split(".layers.")[-1]}
    return Share(counts[True], counts[False], frozenset(names))


def overflow(groups: Groups, config: Config) -> Skipped:
    """Makes one step at a loss scale that no gradient survives."""
    parts = build(groups, config)
    before = [states[MAIN].clone() for _, states in parts.model.optimizer.state.flat_slice_states()]
    batches = StepLoader(config, groups.dp_rank, groups.layout.dp).batches(0) if groups.tp_rank == 0 else None
    update = parts.training.update(parts.training.forward_backward(batches), config.optimizer.lr)
    assert update is not None
    return Skipped(update.overflowed, _largest_momentum(parts), _has_moved(parts, before))


def _largest_momentum(parts: Parts) -> float:
    return max(float(states["exp_avg"].abs().max()) for _, states in parts.model.optimizer.state.flat_slice_states())


def _has_moved(parts: Parts, before: list[torch.Tensor]) -> bool:
    after = [states[MAIN] for _, states in parts.model.optimizer.state.flat_slice_states()]
    return not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
