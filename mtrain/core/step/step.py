"""One training step: plan the denominators, run the pipeline schedule, divide once, check the totals, update.

`TrainingStep.forward_backward` and `TrainingStep.update` are a whole step.
"""

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
    """A step that is still accumulating gradients."""

    sums: StepSums
    factors: NumeratorFactors | None = None
    """Factors of the terms in backward; None before the first pass."""
    is_deferred: bool = False
    """Whether the gradients have yet to be reduced over data-parallel ranks."""
    preference: PreferenceTotals | None = None
    """Totals of the preference loss; None without a preference loss."""


class TrainingStep:
    """Runs the training steps of a model; an `OpenStep` holds the state of a step in progress."""

    def __init__(self, model: RankModel, objective: Objective, teacher: Teacher | None = None) -> None:
        """Connects the model's hooks for gradients and routers; `teacher` is required by terms that read its logits."""
        self._model, self._config, self._groups = model, model.config, model.groups
        self._sharded, self._optimizer = model.sharded, model.optimizer
        self._objective, self._teacher = objective, teacher
        self._num_microbatches = num_microbatches(model.config, model.groups)
        self.routers = RouterBalance(model.config, model.groups, model.chunks)
        self.largest_gradients: Tensor | None = None
        """Largest gradient of each parameter on this rank, before the reduction of the last step; None if reductions
        overlap the backward pass, because then no unreduced gradient is complete."""
        # once: the hooks stay in the configuration of the chunks for all steps
        connect(model.sharded, model.optimizer, model.config.train)

    def forward_backward(self, batches: Sequence[Microbatch] | None, stop_requested: bool = False) -> StepTotals:
        """Accumulates, reduces and normalises the gradients of one global batch.

        One all-reduce of a short float64 vector over all ranks carries the losses, the gradient norm and whether any
        rank was asked to stop. If side terms have denominators of their own, or with fp16, a second all-reduce (within
        each pipeline stage; with fp16 over all ranks) sums the planned denominators during the first forward pass. The
        host waits for the device once, at the end.

        Args:
            batches: Full rows of this data-parallel rank; None on ranks that do not read data (tensor-parallel rank >
                0).
            stop_requested: Whether this rank was asked to stop; `StepTotals` tells all ranks.

        Raises:
            NumericError: A total cannot be right; see `reduce`.
        """
        step = self.open()
        self.accumulate(step, batches, self._num_microbatches, self._objective, is_last=True)
        return self.reduce(step, stop_requested)

    def open(self) -> OpenStep:
        """Clears gradients and counts, and opens a step."""
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
        """Adds the undivided gradients and sums of some microbatches to the step. Collective over the world.

        Args:
            batches: Full rows of this data-parallel rank; None on ranks that do not read data.
            num_microbatches: Number of microbatches of this data-parallel rank; None if only ranks with batches know.
            objective: Must have the same terms in all passes of a step.
            is_last: Whether this is the step's last pass, whose backward may overlap the reduction of gradients. The
                gradients of earlier passes stay on their rank.

        Raises:
            ConfigError: This is a second pass, but terms with denominators of their own need the whole batch in the
                first one.
        """
        batches = self._with_preference_weights(step, batches, num_microbatches, objective)
        # denominators are planned from whole rows on the host, before rows are sliced and sent to other ranks
        planned = planned_denominators(batches or [], step.sums.pairs.terms)
        step.sums.add_batches(planned, token_counts(batches or []))
        factors, terms = self._factors(step, planned, objective), tuple(objective.functions)
        step.sums.pairs.diagnostics.expect(objective.reported)
        # tensor-parallel rank 0 sends whole rows; each context-parallel rank then takes its slice of them
        shared = broadcast_batches(batches, num_microbatches, terms, self._config, self._groups, objective.extras)
        step.sums.num_positions += self._groups.layout.dp * sum(batch.tokens.numel() for batch in shared)
        rows = slice_for_rank(shared, self._groups)
        output_loss = OutputLoss(batches, rows, self._model, objective, self._teacher)
        # megatron-core multiplies the scalar by the loss scale before backward
        loss_scale = self._optimizer.scale_loss(torch.ones((), device=self._groups.device)).reshape(())

        def scalar_of(pairs: Mapping[str, LossPair]) -> Tensor:
            return objective.scalar(pairs, factors.of_terms(), factors.numerator_scale)

        def loss(logits: Logits, batch: Microbatch) -> tuple[Tensor, Mapping[str, LossPair]]:
            return output_loss.scalar(logits, batch, scalar_of, loss_scale)

        step.is_deferred = not is_last

        @functools.cache
        def router_factors() -> Tensor:
            """Waits for the planned denominators; called, and cached, by the first router of the pass."""
            return self._optimizer.scale_loss(factors.of_routers())

        with (
            self.routers.watching(step.sums.pairs, router_factors, max(batch.num_sequences for batch in rows)),
            nullcontext() if is_last else deferred_grad_sync(self._sharded),
        ):
            run_schedule(self._sharded.chunks, rows, loss, step.sums.pairs, self._config)
        # a rank that read no factor completes the all-reduce here, before the next collective
        factors.wait()
        if self._optimizer.scales_loss:
            step.sums.gradient_scale = factors.numerator_scale * loss_scale  # constant within a step

    def _factors(self, step: OpenStep, planned: Mapping[str, float], objective: Objective) -> NumeratorFactors:
        """Returns the factors of the step, which its first pass starts to sum; raises ConfigError if a later pass has
        terms with denominators of their own."""
        if step.factors is None:
            # starts an all-reduce now and waits for it after the first forward pass (at once with fp16 on CPUs)
            is_fp16 = self._optimizer.scales_loss
            # matched by position: `planned` has the order of `objective.coefficients`
            step.factors = NumeratorFactors([*planned.values()], objective, is_fp16, self._groups)
        elif objective.apart:
            raise ConfigError(
                f"the loss terms {', '.join(sorted(objective.apart))} have separate denominators, whose ratio to the "
                "main one must be known before the first backward pass; give the whole global batch in one call"
            )
        return step.factors

    def _with_preference_weights(
        self,
        step: OpenStep,
        batches: Sequence[Microbatch] | None,
        num_microbatches: int | None,
        objective: Objective,
    ) -> Sequence[Microbatch] | None:
        """Runs the scoring pass of a preference loss, and returns the batches with the weights it gives them; returns
        the batches unchanged without a preference loss."""
        if objective.preference is None:
            return batches
        marks = preference_marks(objective.preference)
        if step.preference is not None and marks is not None and marks.couples_groups:
            raise ConfigError(
                f"{objective.names[MAIN_TERM]} compares each answer with the whole batch; give the whole global batch "
                "in one call"
            )
        scored = preference_pass(self._model, objective, batches, num_microbatches)
        step.preference = scored.totals.plus(step.preference or PreferenceTotals())
        return scored.batches

    def reduce(self, step: OpenStep, stop_requested: bool = False) -> StepTotals:
        """Sums gradients and pairs over all ranks, and divides once. Collective over the world.

        All ranks raise together.

        Raises:
            NonFiniteError: A loss is not finite.
            NumericError: A denominator differs from the planned one, is negative, not finite or out of the range of
                float32.
        """
        if not self._config.train.overlap_grad_reduce:
            self.largest_gradients = largest_local_gradients(self._sharded)
        if step.is_deferred:
            for chunk in self._sharded.chunks:
                self._sharded.start_grad_sync(chunk)  # `deferred_grad_sync` suppressed it during backward
        norm_sq = self._optimizer.local_grad_norm_sq
        reduced = finalize_gradients(self._sharded, step.sums, self._groups, stop_requested, norm_sq)
        totals = reduced.read(self._objective.coefficients)
        totals = replace(totals, terms=self.routers.per_layer(totals.terms))
        if step.preference is not None:
            # the second pass yields the gradient and the denominator, but not the value of the loss
            main = replace(totals.terms[MAIN_TERM], numerator=step.preference.numerator)
            terms = {**totals.terms, MAIN_TERM: main}
            diagnostics = {**totals.diagnostics, **step.preference.means}
            totals = replace(totals, terms=terms, sources=(), diagnostics=diagnostics)
        try:
            self.check(totals.terms)
        except BadStepError as error:
            error.totals = totals  # for the record of the step
            raise
        return totals

    def check(self, terms: Mapping[str, TermTotals]) -> None:
        """Raises NumericError on all ranks if a total or a factor of a side term cannot be right."""
        check_totals(terms, compare_with_plan=self._config.loss.denominator == "planned")
        denominators = {term: total.denominator for term, total in terms.items()}
        check_factors(self._objective.coefficients, denominators)

    def update(
        self, totals: StepTotals, lr: float, judge: Callable[[float], None] = lambda grad_norm: None
    ) -> Update | None:
        """Updates the weights and the experts' biases, unless fp16 overflowed.

        Args:
            totals: Result of `reduce`.
            judge: Called with the gradient norm before the update, unless fp16 overflowed; may raise to prevent it.

        Returns:
            The update; None for an empty batch, which leaves weights and optimizer state bit-identical.

        Raises:
            NonFiniteError: The gradient is not finite; weights and state are unchanged.
        """
        if totals.is_empty:
            return None
        assert totals.grad_norm is not None, "the totals come from a pass without backward"
        if not self._optimizer.overflowed(totals.grad_norm):
            judge(totals.grad_norm)
        update = self._optimizer.update(lr, totals.grad_norm)
        # an overflow skips the biases as well as the weights
        if not update.overflowed:
            self.routers.move_biases()
        return update

    def try_weights(self, batches: Sequence[Microbatch] | None) -> None:
        """Verifies the current weights by a forward pass, and changes nothing. One all-reduce of a short vector.

        Raises:
            NumericError: A loss is not finite, or a denominator cannot be right.
        """
        forward_totals(self._model, self._objective, [batches], self._teacher)
