"""What every rank does in the test of a wall clock that jumps."""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple
from unittest import mock

from mtrain.config import Config
from mtrain.mcore.distributed.groups import Groups
from tests.training.faults import numeric_fault_ranks
from tests.training.faults.numeric_fault_ranks import Ending

_DAY_S = 86400.0


class Jumped(NamedTuple):
    """A start under such a clock."""

    ending: Ending
    looks: int
    """At the clock."""


def run_with_jumping_clock(groups: Groups, config: Config) -> Jumped:
    """As `run`; every look at the wall clock finds it a day ahead or behind."""
    real, looks = time.time, itertools.count()

    def jumping() -> float:
        return real() + (_DAY_S if next(looks) % 2 else -_DAY_S)

    with mock.patch("time.time", jumping):
        ending = numeric_fault_ranks.run(groups, config)
    return Jumped(ending, next(looks))
