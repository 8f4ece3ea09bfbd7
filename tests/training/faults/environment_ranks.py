"""Rank side of tests that change the system: too many open files, a wall clock that jumps."""

from __future__ import annotations

import itertools
import os
import resource
import time
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.step import TrainingStep
from mtrain.runs import lock
from mtrain.runs.folder import RunFolder
from mtrain.training.build import Run, build_run
from tests.training.faults.numeric_fault_ranks import Ending, run

_DAY_S = 86400.0


class Jumped(NamedTuple):
    """Result of a start under a clock that jumps."""

    ending: Ending
    looks: int
    """Number of times that the clock was read."""


def without_descriptors(groups: Groups, config: Config, first: int, behind: int) -> Ending:
    """Runs while rank 0 may open no further file from one step until another one."""
    before, seconds = resource.getrlimit(resource.RLIMIT_NOFILE), lock._CHECK_S
    lock._CHECK_S = 0.0  # looks at the lock file before every record

    class Limited(TrainingStep):
        made = 0

        def update(self, *arguments: Any) -> Any:
            """Updates like a step, and sets or lifts the limit first."""
            Limited.made += 1
            if groups.rank == 0 and Limited.made == first:
                # below the first free number, since a file that another thread closes leaves a number free above it
                free = next(number for number in itertools.count() if not os.path.lexists(f"/proc/self/fd/{number}"))
                resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
            if Limited.made == behind:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            return super().update(*arguments)

    def build(config: Config, groups: Groups, folder: RunFolder) -> Run:
        made = build_run(config, groups, folder)
        return replace(made, training=Limited(made.model, made.objective))

    try:
        return run(groups, config, None, build)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        lock._CHECK_S = seconds


def run_with_jumping_clock(groups: Groups, config: Config) -> Jumped:
    """Runs like `run`; every reading of the wall clock is a day too late or too early."""
    real, looks = time.time, itertools.count()

    def jumping() -> float:
        return real() + (_DAY_S if next(looks) % 2 else -_DAY_S)

    with mock.patch("time.time", jumping):
        ending = run(groups, config)
    return Jumped(ending, next(looks))
