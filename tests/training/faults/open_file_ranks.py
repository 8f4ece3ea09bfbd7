"""What ranks do in the test of too many open files."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from typing import Any

from mtrain.config import Config
from mtrain.mcore.distributed.groups import Groups
from mtrain.runs import lock
from mtrain.runs.folder import RunFolder
from mtrain.training.build import Run, build_run
from mtrain.training.step import TrainingStep
from tests.training.faults.numeric_fault_ranks import Ending, run


def without_descriptors(groups: Groups, config: Config, first: int, behind: int) -> Ending:
    """A run in which rank 0 may open no further file from one step on, until another one."""
    before, seconds = resource.getrlimit(resource.RLIMIT_NOFILE), lock._CHECK_S
    lock._CHECK_S = 0.0  # looks at the lock file before every record

    class Limited(TrainingStep):
        made = 0

        def update(self, *arguments: Any) -> Any:
            """As of a step."""
            Limited.made += 1
            if groups.rank == 0 and Limited.made == first:
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), before[1]))
            if Limited.made == behind:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            return super().update(*arguments)

    def build(config: Config, groups: Groups, folder: RunFolder) -> Run:
        made = build_run(config, groups, folder)
        chunks: Any = made.chunks
        return replace(made, training=Limited(config, groups, chunks, made.optimizer, made.objective))

    try:
        return run(groups, config, None, build)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        lock._CHECK_S = seconds
