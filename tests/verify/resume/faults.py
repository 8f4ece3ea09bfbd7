"""Known faults of resuming, which change the resumed run before it trains; ranks find them here by their name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mtrain.arch.layout import Layout
from mtrain.arch.lr import learning_rate
from mtrain.config import Config
from mtrain.core.batch.batch import Microbatch
from mtrain.core.layers.build import build_frozen_model, unwrap
from mtrain.core.layers.init_weights import draw_weights
from mtrain.core.ranks import rng
from mtrain.core.ranks.groups import Groups
from mtrain.core.state.loss_scaler import LossScaler
from mtrain.data.loader import Prefetch, StepLoader
from mtrain.runs.folder import RunFolder
from mtrain.training import trainer
from mtrain.training.build import Run, build_run
from mtrain.verify.resume import worker
from mtrain.verify.resume.worker import SegmentResult, Start, run_start
from tests.verify.planted.plants import become

RandomStates = Mapping[str, Tensor]


def _as_it_is(run: Run, before: RandomStates) -> Run:
    return run


@dataclass(frozen=True)
class ResumePlant:
    """Fault to plant in a start."""

    goes_on: Callable[[Run, RandomStates], Run] = _as_it_is
    """Returns the run that trains from the resumed run and this rank's random states before the resume."""
    keeps_records: bool = False
    """Whether metrics.jsonl keeps records of lost steps."""


SOUND = ResumePlant()


def _spoiled(change: Callable[[Any, int], None]) -> ResumePlant:
    """Spoils the loaded optimizer; `change` also gets Adam's number of updates."""

    @torch.no_grad()
    def goes_on(run: Run, before: RandomStates) -> Run:
        optimizer = run.model.optimizer
        change(optimizer, optimizer.state.adam_step())
        return run

    return ResumePlant(goes_on)


def _rounded(optimizer: Any, adam_step: int) -> None:
    for flat_slice in optimizer.state.flat_slices():
        values = flat_slice.parameter.detach().flatten()[flat_slice.start : flat_slice.end]
        flat_slice.main.copy_(values.view(flat_slice.main.shape))


def _shared_step(optimizer: Any, adam_step: int) -> None:
    shared = torch.tensor(float(adam_step))
    for part in optimizer.inner.chained_optimizers:
        for state in part.optimizer.state.values():
            state["step"] = shared


def _stale_shard(run: Run, before: RandomStates) -> Run:
    """Resets one parameter of the last rank to its initial weights."""
    states = rng.random_states(run.model.groups)
    first, *_ = build_frozen_model(run.model.config, run.model.groups)
    draw_weights(unwrap(first), run.model.config, run.model.groups)  # before, the weights are uninitialised memory
    rng.set_random_states(states)
    if run.model.groups.rank == run.model.groups.layout.world_size - 1:
        next(run.model.chunks[0].parameters()).data.copy_(next(first.parameters()))
    return run


class _FromFirst(StepLoader):
    def iterate(self, from_step: int, pinned: bool = False) -> Prefetch[list[Microbatch]]:
        return super().iterate(0, pinned)


def _first_samples(run: Run, before: RandomStates) -> Run:
    if run.loader is not None:
        become(run.loader, _FromFirst)
    return run


def _restarted_rate(run: Run, before: RandomStates) -> Run:
    patch.object(trainer, "learning_rate", lambda step, *others: learning_rate(step - run.start_step, *others)).start()
    return run


def _initial_scale(run: Run, before: RandomStates) -> Run:
    scale = LossScaler(scale=run.model.config.train.initial_loss_scale, growth_tracker=0, hysteresis_tracker=2)
    run.model.optimizer.state.set_loss_scaler(scale)
    return run


def _random_states_of_before(run: Run, before: RandomStates) -> Run:
    rng.set_random_states(before)
    return run


def put_back(metrics: Path, before: str, start_step: int) -> None:
    """Restores the earlier records, including those of lost steps, and appends the records of this start."""
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(before + "".join(line for line in lines if json.loads(line)["step"] > start_step))


PLANTS: dict[str, ResumePlant] = {
    "run-step-off-by-one": ResumePlant(lambda run, before: replace(run, start_step=run.start_step + 1)),
    "samples-restarted": ResumePlant(_first_samples),
    "learning-rate-restarted": ResumePlant(_restarted_rate),
    "adam-step-off-by-one": _spoiled(lambda optimizer, count: optimizer.state.set_adam_step(count + 1)),
    "adam-step-shared": _spoiled(_shared_step),
    "main-weights-rounded": _spoiled(_rounded),
    "stale-shard": ResumePlant(_stale_shard),
    "loss-scale-restarted": ResumePlant(_initial_scale),
    "random-states-not-restored": ResumePlant(_random_states_of_before),
    "records-kept": ResumePlant(keeps_records=True),
}


@dataclass(frozen=True)
class Planted:
    """Function of ranks that starts a run with a fault."""

    name: str
    __name__ = "run_start"

    def __call__(self, groups: Groups, start: Start) -> SegmentResult:
        plant = PLANTS[self.name]
        sound = build_run

        def build(config: Config, groups: Groups, *others: Any) -> Run:
            before = rng.random_states(groups)
            return plant.goes_on(sound(config, groups, *others), before)

        metrics = RunFolder(Path(start.config.run.dir)).metrics
        keeps = plant.keeps_records and groups.rank == 0 and metrics.exists()
        records = metrics.read_text() if keeps else None
        try:
            with patch.object(worker, "build_run", build):
                seen = run_start(groups, start)
        finally:
            patch.stopall()
        if records is not None:
            put_back(metrics, records, seen.start_step)
        return seen


class FaultyPool:
    """Pool whose ranks start runs with the fault of this moment."""

    def __init__(self, pool: Any) -> None:
        self._pool, self.device = pool, pool.device
        self.fault: str | None = None
        """Name of the fault; None: runs are sound."""

    def run(self, function: Callable[..., Any], layout: Layout, *arguments: Any, **options: Any) -> list[Any]:
        """Runs a function like the pool of the suite."""
        faulty = self.fault is not None and function is run_start
        own = Planted(str(self.fault)) if faulty else function
        found: list[Any] = self._pool.run(own, layout, *arguments, **options)
        return found
