"""Check `mtrain verify resume`: stops and resumes a small copy of the run, and compares it with one that never stopped.

Every start runs the real trainer in new processes, which load the previous start's checkpoint from the run folder.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError, NumericError
from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.config.derived import layout_dependent_keys
from mtrain.config.schema.data import AnyData, MockSection
from mtrain.config.schema.train import AnyOptimizer
from mtrain.core.engine.training_state import WEIGHTS
from mtrain.report.metrics.record import StepRecord
from mtrain.verify.core.exact import ExactJob, exact_steps
from mtrain.verify.core.layouts import DerivedTrials, Prepared, Trial, fitting, parse_trials, prepared
from mtrain.verify.core.ranks import Pool, RankFailedError, all_results, attempted
from mtrain.verify.core.result import Deviation, LayoutResult, ResumeReport, StepValues, Tolerance, diagnosed
from mtrain.verify.core.samples import SamplePlan, of_user, with_loss_tokens
from mtrain.verify.core.shrink import FEW_SAMPLES, Shrunk, has_files, in_float32, replay_notes, small, small_schedule
from mtrain.verify.core.texts import texts_of
from mtrain.verify.core.tolerances import tolerances
from mtrain.verify.parity import Progress, Request, device_for, refuse_without_reference
from mtrain.verify.planted.inject import RESUME_FAULTS, chosen
from mtrain.verify.reference.model.adapters import all_shapes
from mtrain.verify.resume.compare import (
    exact_deviations,
    other_layout,
    records_of,
    same_layout,
    step_values,
    weights_before_each_step,
    worst_in_order,
)
from mtrain.verify.resume.worker import SegmentResult, Start, run_start

PRELOADED = ("mtrain.verify.resume.worker", "mtrain.verify.core.exact")
CRASH = "crash"
"""Axis of the case that resumes after a killed rank."""
_ONE_PROCESS = Trial(micro_batch_size=None)


def verify_resume(config: Config, request: Request, progress: Progress, pool: Pool | None = None) -> ResumeReport:
    """Runs the check; see `verify_parity`."""
    if not 1 <= request.at < request.num_steps:
        raise ConfigError(
            f"--at {request.at} must lie between 1 and --steps {request.num_steps} - 1, so that steps run before and "
            "after the stop"
        )
    refuse_without_reference(config)
    device, max_ranks = device_for(config.train, request.max_ranks)
    plan = planned(config, request, max_ranks)
    notes = replay_notes(config.data, progress)
    if request.fault is not None:
        chosen(request.fault, plan.base.config, (), RESUME_FAULTS)
    pool = pool or Pool(device, PRELOADED, is_deterministic=config.train.deterministic)
    with tempfile.TemporaryDirectory(prefix="mtrain-resume-") as folder:
        check = ResumeCheck(plan, request.at, Path(folder), pool)
        check.prepare()
        results = check.run(progress, request.fault)
    samples = "the run's own data" if plan.shrunk.reads_files else "random tokens"
    samples += " without images" if config.model.vision is not None and not plan.shrunk.reads_files else ""
    return ResumeReport(
        **request.origin(device),
        config=plan.base.config.model_dump(mode="json"),
        changes=(*plan.shrunk.changes, *plan.notes, *notes),
        data=f"{counted(request.num_steps, 'step')} of {samples}, stopped after {request.at}",
        num_steps=request.num_steps,
        tolerances=plan.tolerances,
        tensors=check.tensors,
        reference=check.reference,
        layouts=tuple(results),
        diagnosis=diagnosed(results, lambda result, step: None, ResumeReport.text),
    )


@dataclass(frozen=True)
class ResumePlan:
    """Layouts and configurations of a check."""

    shrunk: Shrunk
    base: Prepared
    """Saving layout with the user's precision, dropout and schedule."""
    comparable: Prepared
    """The same layout in float32 without dropout, for other layouts to resume from; may equal `base`."""
    one: Prepared
    other_layouts: list[Prepared]
    tolerances: tuple[Tolerance, ...]
    samples: SamplePlan
    """The user's data."""
    notes: tuple[str, ...]


def planned(config: Config, request: Request, max_ranks: int) -> ResumePlan:
    """Returns the layouts and the small configurations."""
    base = DerivedTrials(config, max_ranks).full()
    named = None if request.layouts is None else parse_trials(request.layouts, config.layout, max_ranks)
    trials = DerivedTrials(config, max_ranks).for_resume() if named is None else named
    overrides = {"train": {"num_steps": request.num_steps}, "optimizer": _schedule(config.optimizer, request.num_steps)}
    overrides |= {"checkpoint": {"async_save": config.checkpoint.async_save}, "metrics": {"tensorboard": False}}
    overrides |= {"data": {"prefetch_steps": config.data.prefetch_steps, **_curriculum(config.data, request)}}

    def shrink_to(length: int) -> Shrunk:
        return small(config, [base, *trials], length, overrides, FEW_SAMPLES, reads_images=True)

    shrunk = with_loss_tokens(shrink_to, config)
    model, train = shrunk.config.model, shrunk.config.train
    changed = in_float32(config.model)
    model = model.model_copy(update={"attention_dropout": 0.0, "hidden_dropout": 0.0} | changed.get("model", {}))
    train = train.model_copy(update=changed["train"])
    comparable = shrunk.config.model_copy(update={"model": model, "train": train})
    notes = []
    if comparable != shrunk.config:
        notes.append("for other layouts: train.precision: fp32, no dropout, whose draws follow the layout")
    if keys := layout_dependent_keys(config.model, config.loss):
        notes.append(f"other layouts are left out: {', '.join(keys)} changes with the layout by definition")
        trials = []
    saving = prepared(base, shrunk.config)
    fitting_trials = fitting(trials, comparable, are_named=named is not None)
    return ResumePlan(
        shrunk,
        saving,
        prepared(base, comparable),
        prepared(_ONE_PROCESS, comparable),
        [trial for trial in fitting_trials if trial.name != saving.name],
        tolerances(comparable, request.num_steps, has_float64=False) if fitting_trials else (),
        of_user(request.num_steps, config.model if shrunk.reads_files else shrunk.config.model),
        tuple(notes),
    )


def _schedule(optimizer: AnyOptimizer, num_steps: int) -> dict[str, Any]:
    """Fits the user's schedule into a few steps, so that each phase has some."""
    warmup = min(optimizer.warmup_steps, max(1, num_steps // 3))
    # the decay lasts more than its first step
    return small_schedule(optimizer, warmup, min(max(2, num_steps // 3), num_steps - warmup))


def _curriculum(data: AnyData, request: Request) -> dict[str, Any]:
    """Starts the last blend one step after the stop, so that the resumed run changes blends, and earlier blends one
    step apart before it."""
    if isinstance(data, MockSection) or not data.curriculum or not has_files(data):
        return {}
    last = min(request.at + 1, request.num_steps - 1)
    first = max(1, last + 1 - len(data.curriculum))
    blends = [blend.model_copy(update={"from_step": step}) for step, blend in enumerate(data.curriculum, start=first)]
    return {"curriculum": [blend.model_dump() for blend in blends]}


_Finding = tuple[list[StepRecord], list[Deviation]]


class ResumeCheck:
    """Runs of one check; `prepare` makes the straight and the stopped runs once."""

    def __init__(self, plan: ResumePlan, at: int, folder: Path, pool: Pool) -> None:
        """Starts nothing; `folder` must be empty, and the run stops after `at` updates."""
        self._plan, self._at, self._folder, self._pool = plan, at, folder, pool
        self._saved: dict[str, list[SegmentResult]] = {}

    def prepare(self) -> None:
        """Makes the straight run and the runs that stop."""
        plan = self._plan
        stops = {"stopped": plan.base}
        if plan.other_layouts and plan.comparable.config != plan.base.config:
            stops["comparable"] = plan.comparable
        with ThreadPoolExecutor(2 if self._pool.device == "cpu" else 1) as threads:
            straight = threads.submit(self._straight)
            until_stopped = partial(self._start, watched_from=self._at, stop_after=self._at)
            saved = {folder: threads.submit(until_stopped, trial, folder) for folder, trial in stops.items()}
            self._straight_results = straight.result()
            self._saved = {folder: stop.result() for folder, stop in saved.items()}

    def run(self, progress: Progress, fault: str | None) -> list[LayoutResult]:
        """Runs all cases."""
        other_layouts = [partial(self.on_other_layout, trial, fault) for trial in self._plan.other_layouts]
        cases = [partial(self.on_same_layout, fault), partial(self.after_crash, fault), *other_layouts]
        return all_results(cases, self._pool.device, progress)

    def _start(
        self, trial: Prepared, folder: str, saving: Mapping[str, Any] | None = None, **how: Any
    ) -> list[SegmentResult]:
        run = trial.config.run.model_copy(update={"dir": str(self._folder / folder)})
        checkpoint = trial.config.checkpoint.model_copy(update=saving)
        config = trial.config.model_copy(update={"run": run, "checkpoint": checkpoint})
        start = Start(config, self._plan.samples, **how)
        return self._pool.run(run_start, trial.layout, start, seed=config.train.seed)

    def _straight(self) -> list[SegmentResult]:
        began, base = time.monotonic(), self._plan.base
        results = self._start(base, "straight", watched_from=self._at)
        seconds = time.monotonic() - began
        self._expected = records_of(self._folder / "straight")
        names = {name for rank in results for kind, name in rank.states[self._at].tensors if kind == WEIGHTS}
        self.tensors = tuple(name for name in all_shapes(base.config) if name in names)
        steps = tuple(map(step_values, self._expected))
        self.reference = LayoutResult("straight", {}, base.layout.world_size, seconds, steps, steps)
        return results

    def on_same_layout(self, fault: str | None) -> LayoutResult:
        """Resumes on the layout that saved."""
        return self._judged("same layout", self._plan.base, {}, lambda: self._resumed_on_same("stopped", fault))

    def after_crash(self, fault: str | None) -> LayoutResult:
        """Resumes after the last rank was killed between saves."""
        base, at = self._plan.base, self._at
        crash, rank = min(at + 2, base.config.train.num_steps), base.layout.world_size - 1

        def find() -> _Finding:
            source = self._new_folder()
            try:
                self._start(base, source, {"interval_steps": at, "async_save": False}, crash_in=crash)
            except RankFailedError:
                return self._resumed_on_same(source, fault)
            raise NumericError("the killed rank continued")

        return self._judged(f"after a crash of rank {rank} in step {crash}", base, {CRASH: f"rank {rank}"}, find)

    def on_other_layout(self, trial: Prepared, fault: str | None) -> LayoutResult:
        """Resumes on another layout."""
        axes = _changed_axes(self._plan.base, trial)
        return self._judged(f"on {trial.name}", trial, axes, lambda: self._resumed_on_other(trial, fault))

    def _resumed_on_same(self, source: str, fault: str | None) -> _Finding:
        results, records = self._resumed(self._plan.base, source, fault=fault)
        return records, same_layout(results, self._straight_results, records, self._expected)

    def _resumed_on_other(self, trial: Prepared, fault: str | None) -> _Finding:
        source = list(self._saved)[-1]
        results, records = self._resumed(trial, source, gathers=True, fault=fault)
        first, one = results[0], self._plan.one
        texts = texts_of(one.config, self._plan.samples)
        job = ExactJob(one.config, texts.steps[first.start_step :], first.start_step)
        exact = self._pool.run(exact_steps, one.layout, job, weights_before_each_step(first))[0]
        steps = exact_deviations(trial.config, self._plan.tolerances, self.tensors, first, records, exact)
        deviations = other_layout(results, self._saved[source], self._straight_results, records, self._expected, steps)
        return records, deviations

    def _resumed(self, trial: Prepared, source: str, **how: Any) -> tuple[list[SegmentResult], list[StepRecord]]:
        folder = self._new_folder()
        shutil.copytree(self._folder / source, self._folder / folder, dirs_exist_ok=True)
        results = self._start(trial, folder, **how)
        return results, records_of(self._folder / folder)

    def _new_folder(self) -> str:
        return Path(tempfile.mkdtemp(dir=self._folder)).name

    def _judged(self, name: str, trial: Prepared, axes: dict[str, str], find: Callable[[], _Finding]) -> LayoutResult:
        def fields() -> dict[str, Any]:
            records, deviations = find()
            return {"steps": self._after(records), "deviations": tuple(worst_in_order(deviations, self.tensors))}

        result = attempted(name, axes, trial.layout.world_size, fields)
        return replace(result, expected=self._after(self._expected))

    def _after(self, records: Sequence[StepRecord]) -> tuple[StepValues, ...]:
        return tuple(step_values(record) for record in records if record.step > self._at)


def _changed_axes(base: Prepared, trial: Prepared) -> dict[str, str]:
    """Returns the axes that differ from the saving layout, with values such as `2 -> 1`."""
    axes = dict.fromkeys((*base.axes, *trial.axes))
    return {
        axis: f"{base.axes.get(axis, 1)} -> {trial.axes.get(axis, 1)}"
        for axis in axes
        if axis != "microbatches" and base.axes.get(axis) != trial.axes.get(axis)
    }
