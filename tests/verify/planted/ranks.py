"""Ranks of a check that run layouts with a fault, which they find by its name here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mtrain.arch.layout import Layout
from mtrain.core.ranks.groups import Groups
from mtrain.verify.core.worker import Job, Outcome, run_layout
from tests.verify.planted import faults, reach_ranks

PLANTS = {**faults.PLANTS, **reach_ranks.FAULTS}


@dataclass(frozen=True)
class Planted:
    """Function of ranks that runs a layout with a fault."""

    name: str
    __name__ = "run_layout"

    def __call__(self, groups: Groups, job: Job) -> Outcome:
        plant = PLANTS[self.name]
        with plant.planted():
            return run_layout(groups, replace(job, config=plant.configured(job.config)))


class FaultyPool:
    """Pool whose ranks run layouts with a fault."""

    def __init__(self, pool: Any, name: str) -> None:
        self._pool, self._name, self.device = pool, name, pool.device

    def run(self, function: Callable[..., Any], layout: Layout, *arguments: Any, **options: Any) -> list[Any]:
        """Runs a function like the pool of the suite."""
        own = Planted(self._name) if function is run_layout else function
        found: list[Any] = self._pool.run(own, layout, *arguments, **options)
        return found
