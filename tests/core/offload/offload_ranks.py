"""What ranks do in the tests of activations that move to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mtrain.core.layers.offload import activations
from mtrain.core.ranks.groups import Groups
from mtrain.core.ranks.rng import random_states, set_random_states
from tests.core.offload.copies import Copies
from tests.parity.ranks import Outcome, Run, train


class Moved(NamedTuple):
    """A run whose activations move."""

    outcome: Outcome
    num_gone: int
    """Blocks of memory that left this rank for the host."""
    num_back: int
    """Blocks of memory that came back."""


def train_each(groups: Groups, runs: Sequence[Run]) -> list[Moved]:
    """Trains runs of one layout in which tensors of any size move."""
    activations.SMALLEST_MOVED_BYTES = 1
    found, states = [], random_states(groups)
    for run in runs:
        set_random_states(states)  # what dropout draws
        with Copies() as copies:
            outcome = train(groups, run.config, run.parameters or None, run.batches)
        found.append(Moved(outcome, len(copies.gone), len(copies.back)))
    return found
