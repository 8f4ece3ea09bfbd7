"""Check `mtrain verify parity`: compares a small copy of the run in many layouts with one process in float64."""

import datetime
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mtrain.base.errors import ConfigError, MachineError
from mtrain.config import Config
from mtrain.config.schema.loss import own_functions
from mtrain.config.schema.train import AnyOptimizer, TrainSection
from mtrain.verify.core.activations import assemble_outputs, first_deviating, module_order
from mtrain.verify.core.compare import Expected, compared, expected_fields
from mtrain.verify.core.exact import ExactJob, ExactRun, exact_run, exact_steps, text_positions
from mtrain.verify.core.layouts import DerivedTrials, Prepared, Trial, fitting, parse_trials
from mtrain.verify.core.ranks import Pool, all_results, attempted, environment_of
from mtrain.verify.core.result import LayoutResult, ParityReport, diagnosed, with_advice
from mtrain.verify.core.samples import NUM_HARD_KINDS, SamplePlan, of_user, with_loss_tokens
from mtrain.verify.core.shrink import BATCH_SIZE, Shrunk, shrink
from mtrain.verify.core.texts import texts_of
from mtrain.verify.core.tolerances import needs_float64, tolerances
from mtrain.verify.core.weights import Arrays
from mtrain.verify.core.worker import Job, run_layout, run_objective
from mtrain.verify.planted.inject import chosen
from mtrain.verify.reference.policy import EXTRAS

PRELOADED = ("mtrain.verify.core.worker", "mtrain.verify.core.exact", "mtrain.verify.planted.faults")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """Arguments of the command line."""

    layouts: str | None
    """Names of layouts; None derives them."""
    num_steps: int
    max_ranks: int
    fault: str | None
    command: str
    at: int = 0
    """Updates before the stop of `verify resume`."""

    def origin(self, device: str) -> dict[str, Any]:
        """Returns the fields of a report about its origin: time, command, environment, planted fault."""
        return {
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": self.command,
            "environment": environment_of(device),
            "injected": self.fault,
        }


def verify_parity(
    config: Config, request: Request, progress: Progress, pool: Pool | None = None, batch_size: int = BATCH_SIZE
) -> ParityReport:
    """Runs the check, on its own ranks if `pool` is None; `progress` gets a line for each finished layout."""
    refuse_without_reference(config, EXTRAS)
    device, max_ranks = device_for(config.train, request.max_ranks)
    shrunk, trials = _small(config, request, max_ranks, batch_size)
    has_images = config.model.vision is not None
    plan = SamplePlan(0, request.num_steps, choices=config.data.choices, has_images=has_images)
    if shrunk.reads_files:
        own = of_user(request.num_steps, config.model)
        plan = replace(own, hard_steps=NUM_HARD_KINDS, choices=config.data.choices)
    pool = pool or Pool(device, PRELOADED, is_deterministic=config.train.deterministic)
    check = _Check(trials, plan, request.fault, pool)
    layouts = check.run(progress)
    return ParityReport(
        **request.origin(device),
        config=check.config.model_dump(mode="json"),
        changes=(*shrunk.changes, *check.changes),
        data=check.plan.describe(),
        num_steps=check.plan.num_steps,
        tolerances=check.tolerances,
        tensors=check.tensors,
        reference=check.reference,
        layouts=tuple(layouts),
        precision="float64" if needs_float64(config.model) else "float32",
        diagnosis=with_advice(
            diagnosed(layouts, check.first_module, ParityReport.text), own_functions(check.config.loss)
        ),
    )


def refuse_without_reference(config: Config, drawn_extras: Collection[str] = ()) -> None:
    """Refuses a configuration for which `mtrain verify` has no second definition."""
    if (head := config.model.head) is not None:
        raise ConfigError(
            f"verify has no reference for the head of {head}; verify the same configuration without it and with "
            "loss.function=next_token, and see docs/training/heads.md for its tests"
        )
    if config.sequences_per_sample > 1:
        raise ConfigError(
            f"verify has no reference for loss.function={config.loss.function}, which compares whole sequences; "
            "verify the same configuration with loss.function=next_token and data of another format, and see "
            "docs/training/preference.md for the tests of the loss itself"
        )
    run_objective(config, drawn_extras)  # refuses here: an error on a rank would count as a failed run


def device_for(train: TrainSection, max_ranks: int) -> tuple[str, int]:
    """Returns the device of the ranks and their largest number; raises MachineError if CUDA is missing."""
    if train.device == "cpu" or not torch.cuda.is_available():
        if train.device == "cuda":
            raise MachineError("train.device=cuda needs a GPU that torch can use, but it sees none; use auto")
        return "cpu", max_ranks
    return "cuda", min(max_ranks, torch.cuda.device_count())


def _small(config: Config, request: Request, max_ranks: int, batch_size: int) -> tuple[Shrunk, list[Prepared]]:
    """Returns the shrunk configuration and its layouts, first one process with one microbatch."""
    if request.layouts is None:
        trials = DerivedTrials(config, max_ranks).derived()
    else:
        trials = [Trial(micro_batch_size=None), *parse_trials(request.layouts, config.layout, max_ranks)]
    shrunk = with_loss_tokens(lambda length: shrink(config, trials, length, batch_size), config)
    layouts = fitting(trials, shrunk.config, are_named=request.layouts is not None)
    # packed rows may set the micro-batch size, so that trials coincide
    return shrunk, list({trial.name: trial for trial in layouts}.values())


class _Check:
    def __init__(self, trials: list[Prepared], plan: SamplePlan, fault: str | None, pool: Pool) -> None:
        self._trials, self._pool, self._fault, self.plan = trials, pool, fault, plan
        self._base = trials[0]
        self.config = self._base.config
        if fault is not None:
            chosen(fault, self.config, {axis for trial in trials for axis in trial.axes})
        self.tolerances = tolerances(self.config, self.plan.num_steps)
        texts = texts_of(self.config, self.plan)
        self._steps = texts.steps
        self._weights: dict[str, list[Arrays]] = {}
        self.changes: tuple[str, ...] = ()
        """Changes of the configuration by the reference, as lines."""
        self.reference, self.tensors = self._reference()
        fields = [expected_fields(step, self.config) for step in texts.steps]
        self._expected = Expected(self.tolerances, self.tensors, fields, texts.order_faults)

    def run(self, progress: Progress) -> list[LayoutResult]:
        """Runs all layouts."""
        return all_results([partial(self._layout, trial) for trial in self._trials], self._pool.device, progress)

    def _reference(self) -> tuple[LayoutResult, tuple[str, ...]]:
        began = time.monotonic()
        run: ExactRun = self._pool.run(exact_run, self._base.layout, ExactJob(self.config, self._steps))[0]
        self._take(run.optimizer)
        seconds = time.monotonic() - began
        result = LayoutResult("reference", {}, 1, seconds, steps=tuple(run.values), expected=tuple(run.values))
        return result, tuple(run.names)

    def _take(self, optimizer: AnyOptimizer) -> None:
        """Sets the reference's `clip_grad` and `epsilon` in every layout."""
        before = self.config.optimizer
        origins = {"clip_grad": "half of the first gradient's norm", "epsilon": "root mean square of its elements"}
        self.changes = tuple(
            f"optimizer.{key}: {getattr(before, key)} -> {getattr(optimizer, key)} ({origin})"
            for key, origin in origins.items()
            if getattr(before, key) != getattr(optimizer, key)
        )
        self.config = self.config.model_copy(update={"optimizer": optimizer})
        self._trials = [
            replace(trial, config=trial.config.model_copy(update={"optimizer": optimizer})) for trial in self._trials
        ]

    def _layout(self, trial: Prepared) -> LayoutResult:
        def find() -> dict[str, Any]:
            outcomes = self._pool.run(run_layout, trial.layout, Job(trial.config, self.plan, self._fault))
            assert outcomes[0].initial is not None, "rank 0 holds the gathered tensors"
            after = [step.weights.tensors for step in outcomes[0].steps if step.weights is not None]
            # the weights before each step, at which its exact values are computed
            weights = [outcomes[0].initial.tensors, *after[:-1]]
            exact = self._pool.run(exact_steps, self._base.layout, ExactJob(self.config, self._steps), weights)[0]
            self._weights[trial.name] = weights
            return compared(trial, outcomes, exact, self._expected)

        result = attempted(trial.name, trial.axes, trial.layout.world_size, find)
        if result.passed:
            del self._weights[trial.name]
        return result

    def first_module(self, result: LayoutResult, step: int) -> str | None:
        """Runs a layout again up to a step and finds the first module whose output deviates there."""
        trial = next(trial for trial in self._trials if trial.name == result.name)
        job = Job(trial.config, self.plan, self._fault, watched_step=step - 1)
        outcomes = self._pool.run(run_layout, trial.layout, job)
        weights, texts = self._weights[trial.name][step - 1 : step], self._steps[step - 1]
        watched = ExactJob(self.config, [texts], first=step - 1, watches=True)
        exact = self._pool.run(exact_steps, self._base.layout, watched, weights)[0][0]
        is_text = text_positions(texts, self.config)[..., None]
        outputs = assemble_outputs((piece for outcome in outcomes for piece in outcome.pieces), self.config)
        text_outputs = {name: np.where(is_text, output, 0.0) for name, output in outputs.items()}
        order = module_order(self.config.model.num_layers)
        # no output needs more sums than the loss
        tolerance = next(tolerance.value for tolerance in self.tolerances if tolerance.kind == "loss")
        return first_deviating(text_outputs, exact.outputs, order, tolerance)
