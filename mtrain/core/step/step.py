"""Training step: plan, pipeline schedule, one division, check, update."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtrain.base.errors import BadStepError, ConfigError
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.finalize import NumeratorFactors, finalize_gradients
from mtrain.core.engine.loss_reduction import PairAccumulator, StepSums, StepTotals, TermTotals
from mtrain.core.engine.non_finite import largest_local_gradients
from mtrain.core.engine.optimizer import Update
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.engine.router_balance import RouterBalance
from mtrain.core.engine.schedule import connect, deferred_grad_sync, run_schedule
from mtrain.core.layers.output_layer import Logits
from mtrain.core.loss.objective import Objective
from mtrain.core.loss.pair import LossPair
from mtrain.core.loss.preference.scores import preference_marks
from mtrain.core.ranks.broadcast import broadcast_batches, slice_for_rank
from mtrain.core.step.forward import forward_totals, num_microbatches
from mtrain.core.step.loss import OutputLoss
from mtrain.core.step.scoring_pass import PreferenceTotals, preference_pass
from mtrain.core.step.teacher import Teacher
from mtrain.core.step.totals import check_factors, check_totals, planned_denominators, token_counts


@dataclass
class OpenStep:
    """Step whose gradients are being accumulated."""

    sums: StepSums
    factors: NumeratorFactors | None = None
    """Factors of the terms; None before the first pass."""
    is_deferred: bool = False
    """Whether the gradients of the last pass are not reduced over ranks yet."""
    preference: PreferenceTotals | None = None
    """Totals of the preference loss; None if no groups of sequences are compared."""


class TrainingStep:
    """Runs the steps of a model; the state of a step in progress is in an `OpenStep`."""

    def __init__(self, model: RankModel, objective: Objective, teacher: Teacher | None = None) -> None:
        """Connects the model's hooks for gradients and routers; a teacher is needed if a term compares with one."""
        self._model, self._config, self._groups = model, model.config, model.groups
        self._sharded, self._optimizer = model.sharded, model.optimizer
        self._objective, self._teacher = objective, teacher
        self._num_microbatches = num_microbatches(model.config, model.groups)
        self.routers = RouterBalance(model.config, model.groups, model.chunks)
        self.largest_gradients: Tensor | None = None
        """Largest gradient of each parameter on this rank alone, in the last step; None if reductions overlap the
        backward pass, where it never exists."""
        # once: the hooks stay in the chunks' config for all steps
        connect(model.sharded, model.optimizer, model.config.train)

    def forward_backward(self, batches: Sequence[Microbatch] | None, stop_requested: bool = False) -> StepTotals:
        """Accumulates, reduces and normalises the gradients of one global batch: full rows of this data-parallel rank,
        None on ranks that do not read data (tensor-parallel rank > 0).

        One collective of a short float64 vector over all ranks carries the losses, the gradient norm and whether any
        rank was asked to stop. A second one overlaps the first forward pass if terms of several denominators (within
        each pipeline stage) or fp16 need planned denominators. The host waits for the device once, at the end.

        Raises:
            NumericError: A total cannot be right; see `reduce`.
        """
        step = self.open()
        self.accumulate(step, batches, self._num_microbatches, self._objective, is_last=True)
        return self.reduce(step, stop_requested)

    def open(self) -> OpenStep:
        """Opens a step without gradients."""
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

        The objective has the same terms in all passes of a step. `num_microbatches` is None if only ranks with batches
        know it. Gradients stay on their rank in every pass but the last (`is_last`), whose backward pass may overlap
        their reduction.

        Raises:
            ConfigError: A second pass, although terms with other denominators need the whole batch in the first one.
        """
        batches = self._weighed_by_preference(step, batches, num_microbatches, objective)
        # from whole rows on the host, so before anything is sent to other ranks
        planned = planned_denominators(batches or [], step.sums.pairs.terms)
        step.sums.add_batches(planned, token_counts(batches or []))
        if step.factors is None:
            # starts its collective now; waits for it after the first forward pass (fp16 on CPUs: at once)
            is_fp16 = self._optimizer.scales_loss
            # by position: `planned` has the order of `objective.coefficients`
            step.factors = NumeratorFactors([*planned.values()], objective, is_fp16, self._groups)
        elif objective.apart:
            raise ConfigError(
                f"the loss terms {', '.join(sorted(objective.apart))} have separate denominators, whose ratio to the "
                "main one must be known before the first backward pass; give the whole global batch in one call"
            )
        step.sums.pairs.diagnostics.expect(objective.reported)
        factors, terms = step.factors, tuple(objective.functions)
        # tensor-parallel rank 0 sends whole rows; each context-parallel rank then slices out its own part
        shared = broadcast_batches(batches, num_microbatches, terms, self._config, self._groups, objective.extras)
        step.sums.num_positions += self._groups.layout.dp * sum(batch.tokens.numel() for batch in shared)
        rows = slice_for_rank(shared, self._groups)
        output_loss = OutputLoss(batches, rows, self._model, objective, self._teacher)
        # megatron-core multiplies the objective by it before backward
        loss_scale = self._optimizer.scale_loss(torch.ones((), device=self._groups.device)).reshape(())

        def scalar_of(pairs: Mapping[str, LossPair]) -> Tensor:
            return objective.scalar(pairs, factors.of_terms(), factors.numerator_scale)

        def loss(logits: Logits, batch: Microbatch) -> tuple[Tensor, Mapping[str, LossPair]]:
            return output_loss.scalar(logits, batch, scalar_of, loss_scale)

        step.is_deferred = not is_last

        @functools.cache
        def router_factors() -> Tensor:
            """Waits for the planned denominators, so the first router of the pass calls it."""
            return self._optimizer.scale_loss(factors.of_routers())

        with (
            self.routers.watching(step.sums.pairs, router_factors, max(batch.num_sequences for batch in rows)),
            nullcontext() if is_last else deferred_grad_sync(self._sharded),
        ):
            run_schedule(self._sharded.chunks, rows, loss, step.sums.pairs, self._config)
        # a rank that asked for no factor finishes the collective here, before the next one
        factors.wait()
        if self._optimizer.scales_loss:
            step.sums.gradient_scale = factors.numerator_scale * loss_scale  # the same in every pass of a step

    def _weighed_by_preference(
        self,
        step: OpenStep,
        batches: Sequence[Microbatch] | None,
        num_microbatches: int | None,
        objective: Objective,
    ) -> Sequence[Microbatch] | None:
        """Returns the batches to differentiate: with a preference loss those weighted by its scoring pass."""
        if objective.preference is None:
            return batches
        marks = preference_marks(objective.preference)
        if step.preference is not None and marks is not None and marks.couples_groups:
            raise ConfigError(
                f"{objective.names[MAIN_TERM]} compares each answer with the whole batch; give the whole global batch "
                "in one call"
            )
        found = preference_pass(self._model, objective, batches, num_microbatches)
        step.preference = found.totals.plus(step.preference or PreferenceTotals())
        return found.batches

    def reduce(self, step: OpenStep, stop_requested: bool = False) -> StepTotals:
        """Sums gradients and pairs over all ranks, and divides once. Collective over the world.

        Raises:
            NonFiniteError: A loss is not finite; on all ranks.
            NumericError: A denominator differs from the planned one, is negative, not finite or out of the range of
                float32; on all ranks.
        """
        if not self._config.train.overlap_grad_reduce:
            self.largest_gradients = largest_local_gradients(self._sharded)
        if step.is_deferred:
            for chunk in self._sharded.chunks:
                self._sharded.start_grad_sync(chunk)  # `deferred_grad_sync` has held it back
        norm_sq = self._optimizer.local_grad_norm_sq
        reduced = finalize_gradients(self._sharded, step.sums, self._groups, stop_requested, norm_sq)
        totals = reduced.read(self._objective.coefficients)
        totals = replace(totals, terms=self.routers.per_layer(totals.terms))
        if step.preference is not None:
            # the second pass has only the gradient and the denominator of the loss
            main = replace(totals.terms[MAIN_TERM], numerator=step.preference.numerator)
            terms = {**totals.terms, MAIN_TERM: main}
            diagnostics = {**totals.diagnostics, **step.preference.means}
            totals = replace(totals, terms=terms, sources=(), diagnostics=diagnostics)
        try:
            self.check(totals.terms)
        except BadStepError as error:
            error.totals = totals  # for the step's record
            raise
        return totals

    def check(self, terms: Mapping[str, TermTotals]) -> None:
        """Raises NumericError if a total cannot be right, on all ranks."""
        check_totals(terms, compare_with_plan=self._config.loss.denominator == "planned")
        denominators = {term: each.denominator for term, each in terms.items()}
        check_factors(self._objective.coefficients, denominators)

    def update(
        self, totals: StepTotals, lr: float, judge: Callable[[float], None] = lambda grad_norm: None
    ) -> Update | None:
        """Makes the optimizer step and updates the experts' biases, unless fp16 overflowed.

        Returns None for an empty batch: weights and state stay bit-identical. Before anything is applied `judge` gets
        the gradient norm, and raises to prevent it; not if fp16 overflowed.

        Raises:
            NonFiniteError: The gradient is not finite; weights and state are untouched.
        """
        if totals.is_empty:
            return None
        assert totals.grad_norm is not None, "of a forward pass alone"
        if not self._optimizer.overflowed(totals.grad_norm):
            judge(totals.grad_norm)
        update = self._optimizer.update(lr, totals.grad_norm)
        # biases are updated with the weights: on an overflow neither is
        if not update.overflowed:
            self.routers.move_biases()
        return update

    def try_weights(self, batches: Sequence[Microbatch] | None) -> None:
        """Runs a forward pass to verify that the current weights can be used; changes nothing. One all-reduce of a
        short vector.

        Raises:
            NumericError: A loss is not finite, or a denominator cannot be right.
        """
        forward_totals(self._model, self._objective, [batches], self._teacher)
