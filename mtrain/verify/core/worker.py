"""Work of each rank for one layout.

Layers that normalise small vectors amplify rounding by a factor that depends on the weights, so no bound separates a
fault from float32 rounding. Their steps are also made in float64, which has 29 more bits, at the run's own weights:
its amplified rounding stays far below the last digit of float32.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from mtrain.arch.lr import learning_rate
from mtrain.base.errors import ConfigError, NumericError
from mtrain.checkpoint.state.gather import gradient_shards, parameter_shards
from mtrain.config import Config
from mtrain.config.extras import TEMPERATURE, as_configured
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.loss_reduction import StepTotals, TermTotals
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.engine.rank_model import RankModel, build_model
from mtrain.core.engine.sharded_model import ShardedModel
from mtrain.core.layers.build import build_frozen_model, unwrap
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.step import TrainingStep
from mtrain.core.step.teacher import Teacher
from mtrain.verify.core.activations import RecordedOutput, recorded_outputs
from mtrain.verify.core.reach import shrink_chunks, small_blocks
from mtrain.verify.core.result import StepValues
from mtrain.verify.core.samples import Batches, SamplePlan, drawn_extras
from mtrain.verify.core.tolerances import needs_float64
from mtrain.verify.core.weights import Whole, drawn, gathered, set_weights
from mtrain.verify.planted.faults import planted
from mtrain.verify.reference.policy import EXTRAS
from mtrain.verify.reference.schedule import telling_steps


@dataclass(frozen=True)
class Job:
    """Work of one layout."""

    config: Config
    plan: SamplePlan
    fault: str | None = None
    watched_step: int | None = None
    """Index of the last step to run, which records module outputs; None: all steps run and none does."""


@dataclass(frozen=True)
class InFloat64:
    """Loss and gradients of a step in float64 at the same weights."""

    means: dict[str, float]
    gradients: Whole | None


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of one step on a rank."""

    values: StepValues
    guard: str | None
    """Message of the run's own checks; None if they passed."""
    gradients: Whole | None
    """Normalised gradients before clipping, on rank 0."""
    weights: Whole | None
    in_float64: InFloat64 | None = None
    """Set if only float64 separates a fault from rounding."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a few steps on a rank."""

    initial: Whole | None
    steps: list[StepOutcome]
    pieces: list[RecordedOutput]
    batches: list[list[Microbatch]] = field(default_factory=list)
    """Full rows that were trained on, by step; only on one rank for each part of the data."""
    rates: dict[int, float] = field(default_factory=dict)
    """The run's learning rate at the updates of `telling_steps`, counted from 0."""


class _NoUpdates(Optimizer):
    """Optimizer that never updates; megatron-core's optimizers do not support float64."""

    def __init__(self, sharded: ShardedModel, groups: Groups) -> None:
        self.sharded, self._device, self.scales_loss = sharded, groups.device, False

    def zero_grad(self) -> None:
        self.sharded.zero_grad()

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss

    def local_grad_norm_sq(self) -> Tensor:
        """Returns 0: a run reports the norm of its own gradients."""
        return torch.zeros((), dtype=torch.float64, device=self._device)


@torch.no_grad()
def _copy_weights(chunks: Sequence[nn.Module], source: Sequence[nn.Module]) -> None:
    """Copies this rank's weights and expert biases to chunks of another precision."""
    for chunk, source_chunk in zip(map(unwrap, chunks), map(unwrap, source), strict=True):
        values = dict(source_chunk.named_parameters()) | dict(source_chunk.named_buffers())
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            tensor.copy_(values[name])


class _LenientStep(TrainingStep):
    """Training step that records a failed check of the totals and continues, so that everything is compared."""

    failed_check: str | None = None

    def check(self, terms: Mapping[str, TermTotals]) -> None:
        self.failed_check = None
        try:
            super().check(terms)
        except NumericError as error:
            self.failed_check = str(error)


def run_layout(groups: Groups, job: Job) -> Outcome:
    """Trains a few steps from weights that do not depend on the layout. Collective."""
    with small_blocks(), planted(job.fault):
        return _Runner(groups, job).run()


def run_objective(config: Config, drawn_extras: Collection[str] = ()) -> Objective:
    """Returns the objective of the run; refuses extras not in `drawn_extras`, which only the user's data have."""
    objective = Objective.from_config(config.loss, config.model)
    if missing := [name for name in objective.extras if name not in drawn_extras]:
        names = ", ".join(as_configured(missing))
        raise ConfigError(
            f"verify draws its own samples, which have no {names}, and compares with a reference that reads none, but "
            "the loss functions need them; verify the rest of the configuration with loss.function=next_token and no "
            "such side term, and see docs/proof/same-loss-on-any-layout.md for the reason"
        )
    return objective


class _Runner:
    def __init__(self, groups: Groups, job: Job) -> None:
        config = job.config
        self._groups, self._job, self._config = groups, job, config
        self._seen: list[list[Microbatch]] = []
        # every rank needs the positions of the samples if module outputs are recorded
        reads = groups.tp_rank == 0 or job.watched_step is not None
        self._batches = Batches(config, job.plan, groups.dp_rank, groups.layout.dp) if reads else None
        objective = replace(
            run_objective(config, EXTRAS),
            choices=job.plan.choices,
            has_temperatures=TEMPERATURE in drawn_extras(config.loss),
        )
        self._models: list[RankModel] = []
        self._steps: list[_LenientStep] = []
        for in_float64 in (False, True) if needs_float64(config.model) else (False,):
            # in float64 parameters are not gathered in the forward pass
            train = config.train.model_copy(update={"overlap_param_gather": False})
            variant = config.model_copy(update={"train": train}) if in_float64 else config
            sharded = build_model(variant, groups, weights_follow=True, in_float64=in_float64)
            shrink_chunks(sharded.chunks)
            set_weights(sharded.chunks, groups, lambda name, shape: drawn(name, shape, config))
            optimizer = _NoUpdates(sharded, groups) if in_float64 else Optimizer(variant, sharded, groups)
            model, teacher = RankModel(variant, groups, sharded, optimizer), small_teacher(variant, groups, in_float64)
            self._models.append(model)
            self._steps.append(_LenientStep(model, objective, teacher))
        self._sharded, self._training = self._models[0].sharded, self._steps[0]

    def run(self) -> Outcome:
        """Trains all steps, or those up to the watched one."""
        initial = gathered(parameter_shards(self._sharded.chunks, self._groups))
        watched = self._job.watched_step
        steps: list[StepOutcome] = []
        pieces: list[RecordedOutput] = []
        for number in range(self._job.plan.num_steps if watched is None else watched + 1):
            positions = self._batches.positions(number) if self._batches is not None and number == watched else None
            # of the float64 model, if any
            with recorded_outputs(self._models[-1].chunks, self._groups, self._config, positions) as recorded:
                outcome = self._step(number)
            steps.append(outcome)
            pieces = recorded
            if outcome.weights is None and self._groups.rank == 0:
                break
        schedule = self._config.optimizer, self._config.train.num_steps
        rates = {number: learning_rate(number, *schedule) for number in telling_steps(*schedule)}
        return Outcome(initial, steps, pieces, self._seen, rates)

    def _step(self, number: int) -> StepOutcome:
        batches = self._batches.of_step(number) if self._batches is not None and self._groups.tp_rank == 0 else None
        if batches is not None and self._groups.cp_rank == self._groups.pp_rank == 0:
            self._seen.append(batches)
        wide = self._step_in_float64(number, batches) if len(self._models) > 1 else None
        totals = self._training.forward_backward(batches)
        gradients = gathered(gradient_shards(self._sharded, self._groups))
        grad_norm, guard = self._update(totals)
        self._sharded.gather_parameters()
        weights = gathered(parameter_shards(self._sharded.chunks, self._groups))
        guard = self._training.failed_check or guard
        return StepOutcome(step_values(number, totals, grad_norm), guard, gradients, weights, wide)

    def _step_in_float64(self, number: int, batches: list[Microbatch] | None) -> InFloat64:
        sharded = self._models[1].sharded
        _copy_weights(sharded.chunks, self._sharded.chunks)
        totals = self._steps[1].forward_backward(batches)
        gradients = gathered(gradient_shards(sharded, self._groups))
        return InFloat64(step_values(number, totals, 0.0).means, gradients)

    def _update(self, totals: StepTotals) -> tuple[float, str | None]:
        """Makes the update, and returns the gradient norm and the message of a failed check.

        The steps use the highest learning rate, where an update is visible: the schedule is compared separately.
        """
        try:
            update = self._training.update(totals, self._config.optimizer.lr)
        except NumericError as error:
            return float("nan"), str(error)
        return 0.0 if update is None else update.grad_norm, None


def small_teacher(config: Config, groups: Groups, in_float64: bool = False) -> Teacher | None:
    """Returns a teacher of the shrunk model's size, with its own weights; None if the run has no teacher."""
    if config.loss.teacher is None:
        return None
    config = config.model_copy(update={"adapter": None})  # only the student has adapters
    chunks = build_frozen_model(config, groups, in_float64)
    set_weights(chunks, groups, lambda name, shape: drawn(name, shape, config, "teacher"))
    return Teacher(config, chunks, groups)


def step_values(number: int, totals: StepTotals, grad_norm: float) -> StepValues:
    """Returns the reported values of the step with index `number`."""
    terms = {name: (term.mean, term.numerator, term.denominator) for name, term in totals.terms.items()}
    return StepValues.of(number + 1, totals.objective, terms, grad_norm)


def disagreement(outcomes: Sequence[Outcome]) -> str | None:
    """Says which ranks report other numbers than rank 0; returns None if all agree to the last bit."""

    reports = [[repr(step.values) for step in outcome.steps] for outcome in outcomes]
    differing = [rank for rank, values in enumerate(reports) if values != reports[0]]
    return f"ranks {differing} report another loss, denominator or gradient norm than rank 0" if differing else None
