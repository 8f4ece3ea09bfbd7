"""What ranks do in the tests of moments that lie on the host."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mtrain.config import Config
from mtrain.core.engine import host_moments
from mtrain.core.engine.host_moments import HostMoments
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.engine.optimizer_state import MAIN
from mtrain.core.ranks.groups import Groups
from mtrain.data.loader import StepLoader
from tests.core.engine import fused_adam_ranks
from tests.core.state import checkpoint_ranks
from tests.core.state.checkpoint_ranks import Outcome
from tests.plan.allocations import Allocations

AT_ONCE_BYTES = 2**13
"""Bytes moved at a time: several parameters of the small models fit, of others a single one is larger."""
STOP, SAVE_AT = 4, 2


class Crossed(NamedTuple):
    """Runs of one configuration, whose moments lie on the device or on the host."""

    on_device: Outcome
    on_host: Outcome
    """A run that saves on its way."""
    from_host: Outcome
    """A run on the device that resumes from what the host run saved."""
    from_device: Outcome
    """A run on the host that resumes from what the device run saved."""


def cross(groups: Groups, config: Config, folder: Path, counts_by_group: bool) -> Crossed:
    """Makes all four runs, one after the other."""
    host_moments.MOMENTS_AT_ONCE_BYTES = AT_ONCE_BYTES
    found = []
    for resume_at in (None, SAVE_AT):
        for is_on_host in (False, True):
            own, other = (folder / str(each) for each in (is_on_host, not is_on_host))
            train = config.train.model_copy(update={"offload_optimizer": is_on_host})
            given = groups, config.model_copy(update={"train": train})
            if resume_at is None:
                begin = *given, own, None, STOP, SAVE_AT
                found.append(fused_adam_ranks.train(*begin)[0] if counts_by_group else checkpoint_ranks.train(*begin))
            else:
                rest = *given, other, resume_at, STOP
                found.append(fused_adam_ranks.train(*rest)[0] if counts_by_group else checkpoint_ranks.train(*rest))
    on_device, on_host, from_host, from_device = found
    return Crossed(on_device, on_host, from_host, from_device)


class Memory(NamedTuple):
    """Bytes of one rank around its second update."""

    moments: int
    on_host: int
    largest: int
    """Bytes of the moments of the largest parameter."""
    at_once: int
    """Most bytes that the update allocates at once."""
    num_elsewhere: int
    """Number of moments outside the host's memory before and after the update."""


def memory(groups: Groups, config: Config) -> Memory:
    """Measures a run whose moments are on the host."""
    host_moments.MOMENTS_AT_ONCE_BYTES = AT_ONCE_BYTES
    parts = checkpoint_ranks.build(groups, config)
    loader = StepLoader(config, groups.dp_rank, groups.layout.dp)
    optimizer, elsewhere = parts.model.optimizer, 0
    assert optimizer.host_moments is not None
    for step in range(2):
        totals = parts.training.forward_backward(loader.batches(step))
        elsewhere += _num_elsewhere(optimizer, optimizer.host_moments)
        with Allocations() as update:
            parts.training.update(totals, config.optimizer.lr)
        elsewhere += _num_elsewhere(optimizer, optimizer.host_moments)
    sizes = [
        sum(values.nbytes for name, values in states.items() if name != MAIN)
        for _, states in optimizer.state.flat_slice_states()
    ]
    on_host = sum(each.nbytes for each in optimizer.host_moments.memory)
    return Memory(sum(sizes), on_host, max(sizes), update.peak, elsewhere)


def _num_elsewhere(optimizer: Optimizer, moments: HostMoments) -> int:
    places = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in moments.memory]
    return sum(
        not any(start <= values.data_ptr() < end for start, end in places)
        for _, states in optimizer.state.flat_slice_states()
        for name, values in states.items()
        if name != MAIN
    )


def num_moments(groups: Groups, config: Config) -> int:
    """Returns the number of elements whose moments lie on this rank's host, after an update."""
    parts = checkpoint_ranks.build(groups, config)
    totals = parts.training.forward_backward(StepLoader(config, groups.dp_rank, groups.layout.dp).batches(0))
    assert parts.training.update(totals, config.optimizer.lr) is not None
    assert parts.model.optimizer.host_moments is not None
    return sum(each.nbytes for each in parts.model.optimizer.host_moments.memory) // 8
