"""One training step: plan, pipeline schedule, one division, check, update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtrain.base.errors import BadStepError, ConfigError
from mtrain.data.batch import Microbatch
from mtrain.loss.objective import Objective
from mtrain.loss.pair import MAIN_TERM, LossPair
from mtrain.loss.preference.scores import preference_marks
from mtrain.loss.scaling import check_factors
from mtrain.mcore.distributed.broadcast import broadcast_batches, slice_for_rank
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine.finalize import Finalize, finalize_gradients
from mtrain.mcore.engine.loss_reduction import PairAccumulator, StepSums, StepTotals, TermTotals
from mtrain.mcore.engine.numerator_factors import NumeratorFactors
from mtrain.mcore.engine.optimizer import Update
from mtrain.mcore.engine.rank_model import RankModel
from mtrain.mcore.engine.router_balance import RouterBalance
from mtrain.mcore.engine.schedule import Schedule, connect, deferred_grad_sync, run_schedule, start_grad_sync
from mtrain.mcore.health.non_finite import largest_local_gradients
from mtrain.mcore.model.output_layer import Logits
from mtrain.mcore.state.teacher import Teacher
from mtrain.training.forward import forward_totals, num_microbatches
from mtrain.training.output.loss import OutputLoss
from mtrain.training.preferences.scoring_pass import PreferenceTotals, preference_pass
from mtrain.training.totals import check_totals, planned_denominators, token_counts


@dataclass(frozen=True)
class StepParts:
    """What a step hands its work to, in this order; whoever checks the check puts a faulty one in the place of one."""

    factors: type[NumeratorFactors] = NumeratorFactors
    slice_rows: Callable[[Sequence[Microbatch], Groups], list[Microbatch]] = slice_for_rank
    output_loss: type[OutputLoss] = OutputLoss
    routers: type[RouterBalance] = RouterBalance
    run_schedule: Schedule = run_schedule
    finalize: Finalize = finalize_gradients


@dataclass
class OpenStep:
    """A step whose gradients are being added up."""

    sums: StepSums
    factors: NumeratorFactors | None = None
    """From the first pass on."""
    is_deferred: bool = False
    """Whether the gradients of the last pass are still those of each rank."""
    preference: PreferenceTotals | None = None
    """Where groups of sequences are compared."""


class TrainingStep:
    """Runs steps of one model; what is under way is in an `OpenStep`."""

    def __init__(
        self,
        model: RankModel,
        objective: Objective,
        teacher: Teacher | None = None,
        parts: StepParts = StepParts(),
    ) -> None:
        """Args:
        model: What is trained.
        objective: What is minimised.
        teacher: Where a term of the objective needs one.
        parts: What does the work.
        """
        self._model, self._config, self._groups = model, model.config, model.groups
        self._chunks, self._optimizer = model.chunks, model.optimizer
        self._objective, self._teacher = objective, teacher
        self._num_microbatches, self._parts = num_microbatches(model.config, model.groups), parts
        self.routers = parts.routers(model.config, model.groups, model.chunks)
        self.local_gradients: Tensor | None = None
        """Of the last step: the largest gradient of each parameter on this rank alone; None where reductions overlap
        the backward pass, so that no such moment is there."""
        # once: the hooks stay in the chunks' config from step to step
        connect(model.chunks, model.optimizer, model.config)

    def forward_backward(self, batches: Sequence[Microbatch] | None, stop_requested: bool = False) -> StepTotals:
        """Accumulates, reduces and normalises the gradients of one global batch.

        One collective of a short float64 vector over all ranks carries both the losses and the gradient norm; a second
        one, beside the first forward pass, where terms of several denominators (within each pipeline stage) or fp16
        need the plan. The host waits for the device once, at the end.

        Args:
            batches: This data-parallel rank's microbatches, full rows; None on ranks that do not read data
                (tensor-parallel rank > 0).
            stop_requested: Joined over all ranks into `StepTotals.stop_requested`.

        Raises:
            NumericError: As `reduce`.
        """
        step = self.open()
        self.accumulate(step, batches, self._num_microbatches, self._objective, is_last=True)
        return self.reduce(step, stop_requested)

    def open(self) -> OpenStep:
        """A step without gradients."""
        self._optimizer.zero_grad()
        self.routers.clear_counts()
        terms, num_sources = tuple(self._objective.functions), len(self._config.data.source_names)
        pairs = PairAccumulator(terms, self._groups.device, self._objective.router_terms, num_sources)
        return OpenStep(StepSums(pairs, dict.fromkeys(pairs.terms, 0.0)))

    def accumulate(
        self,
        step: OpenStep,
        batches: Sequence[Microbatch] | None,
        num_microbatches: int | None,
        objective: Objective,
        is_last: bool,
    ) -> None:
        """Adds the gradients and sums of some microbatches, not divided by anything. Collective over the world.

        Args:
            step: Receives them.
            batches: As for `forward_backward`.
            num_microbatches: How many they are, the same on all ranks; None where ranks without batches do not know.
            objective: What is differentiated; of the same terms in all passes of a step.
            is_last: No pass follows, so that gradients may be reduced beside the backward pass.

        Raises:
            ConfigError: A second pass, where terms of other denominators need the whole global batch in the first.
        """
        batches = self._compared(step, batches, num_microbatches, objective)
        # on the host and from whole rows, so before anything is sent to other ranks
        planned = planned_denominators(batches or [], step.sums.pairs.terms)
        step.sums.add_batches(planned, token_counts(batches or []))
        if step.factors is None:
            # starts its collective now and waits for it behind the first forward pass (fp16 on CPUs: at once)
            is_fp16 = self._optimizer.scales_loss
            step.factors = self._parts.factors([*planned.values()], objective, is_fp16, self._groups)
        elif objective.apart:
            raise _denominators_too_late(objective)
        step.sums.pairs.diagnostics.expect(objective.reported)
        factors, terms = step.factors, tuple(objective.functions)
        # tensor-parallel rank 0 sends whole rows; each context-parallel rank then cuts its own part
        shared = broadcast_batches(batches, num_microbatches, terms, self._config, self._groups, objective.extras)
        step.sums.num_positions += self._groups.layout.dp * sum(batch.tokens.numel() for batch in shared)
        rows = self._parts.slice_rows(shared, self._groups)
        output_loss = self._parts.output_loss(batches, rows, self._config, self._groups, objective, self._teacher)
        # what megatron-core multiplies the objective by before backward
        loss_scale = self._optimizer.scale_loss(torch.ones((), device=self._groups.device)).reshape(())

        def scalar_of(pairs: Mapping[str, LossPair]) -> Tensor:
            return objective.scalar(pairs, factors.of_terms(), factors.numerator_scale)

        def loss(logits: Logits, batch: Microbatch) -> tuple[Tensor, Mapping[str, LossPair]]:
            return output_loss.scalar(logits, batch, scalar_of, loss_scale)

        step.is_deferred = not is_last
        # a function, since it waits for the plan: called by the first router, not ahead of the forward pass
        router_factors = functools.cache(lambda: self._optimizer.scale_loss(factors.of_routers()))
        with (
            self.routers.watching(step.sums.pairs, router_factors, max(batch.num_sequences for batch in rows)),
            nullcontext() if is_last else deferred_grad_sync(self._chunks),
        ):
            self._parts.run_schedule(self._chunks, rows, loss, step.sums.pairs, self._config)
        # a rank that asked for no factor ends its part of the collective here, before it takes part in the next one
        factors.wait()
        if self._optimizer.scales_loss:
            step.sums.gradient_scale = factors.numerator_scale * loss_scale  # the same in every pass of a step

    def _compared(
        self,
        step: OpenStep,
        batches: Sequence[Microbatch] | None,
        num_microbatches: int | None,
        objective: Objective,
    ) -> Sequence[Microbatch] | None:
        """What the gradient is made with: where groups are compared, what the pass has made of the batches that comes
        first."""
        if objective.preference is None:
            return batches
        marks = preference_marks(objective.preference)
        if step.preference is not None and marks is not None and marks.couples_groups:
            raise ConfigError(
                f"{objective.names[MAIN_TERM]} compares each answer with the whole batch; give the whole global batch "
                "in one call"
            )
        found = preference_pass(self._model, objective.preference, batches, num_microbatches)
        step.preference = found.totals.plus(step.preference or PreferenceTotals())
        return found.batches

    def reduce(self, step: OpenStep, stop_requested: bool = False) -> StepTotals:
        """Sums gradients and pairs over all ranks, and divides once. Collective over the world.

        Raises:
            NonFiniteError: A loss is not finite; on all ranks alike, as the next one.
            NumericError: A denominator is not what the batch planned, negative, not finite or beyond what float32
                carries.
        """
        if not self._config.train.overlap_grad_reduce:
            self.local_gradients = largest_local_gradients(self._chunks)
        if step.is_deferred:
            start_grad_sync(self._chunks, self._config)
        norm_sq = self._optimizer.local_grad_norm_sq
        reduced = self._parts.finalize(self._chunks, step.sums, self._groups, stop_requested, norm_sq)
        totals = reduced.read(self._objective.coefficients)
        totals = replace(totals, terms=self.routers.per_layer(totals.terms))
        if (compared := step.preference) is not None:
            diagnostics = {**totals.diagnostics, **compared.means}
            totals = replace(totals, terms=compared.in_place_of(totals.terms), sources=(), diagnostics=diagnostics)
        try:
            self.check(totals.terms)
        except BadStepError as error:
            error.totals = totals  # for the record of the step
            raise
        return totals

    def check(self, terms: Mapping[str, TermTotals]) -> None:
        """Raises NumericError where a total cannot be right, on all ranks alike."""
        check_totals(terms, compare_with_plan=self._config.loss.denominator == "planned")
        denominators = {term: each.denominator for term, each in terms.items()}
        check_factors(self._objective.coefficients, denominators)

    def update(
        self, totals: StepTotals, lr: float, judge: Callable[[float], None] = lambda grad_norm: None
    ) -> Update | None:
        """The optimizer step, and where it succeeded that of the experts' biases.

        None where the batch was empty: weights and state stay bit-identical.

        Args:
            totals: Of the step.
            lr: Learning rate.
            judge: Is given the gradient's norm before anything is applied, and raises where it must not be; not called
                where fp16 overflowed.

        Raises:
            NonFiniteError: The gradient is not finite; weights and state are untouched.
        """
        if totals.is_empty:
            return None
        assert totals.grad_norm is not None, "of a forward pass alone"
        if not self._optimizer.overflowed(totals.grad_norm):
            judge(totals.grad_norm)
        update = self._optimizer.update(lr, totals.grad_norm)
        # biases move with the weights: on an overflow neither does
        if not update.overflowed:
            self.routers.move_biases()
        return update

    def try_weights(self, batches: Sequence[Microbatch] | None) -> None:
        """A forward pass with the weights as they are, to see that they can be used; changes nothing.

        One all-reduce of a short vector, beside megatron-core's own collectives.

        Args:
            batches: As for `forward_backward`.

        Raises:
            NumericError: As `forward_backward`.
        """
        forward_totals(self._model, self._objective, [batches], self._teacher)


def _denominators_too_late(objective: Objective) -> ConfigError:
    return ConfigError(
        f"the loss terms {', '.join(sorted(objective.apart))} have denominators of their own, whose ratio to "
        "the main one must be known before the first backward pass; give the whole global batch in one call"
    )
