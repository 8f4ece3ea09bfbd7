"""One training step: plan, pipeline schedule, one division, guard, update."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mtrain.base.errors import NumericError
from mtrain.config import Config
from mtrain.config.schema.loss import depth_term
from mtrain.data.batch import Microbatch
from mtrain.data.collate import loss_terms
from mtrain.loss.objective import Objective, power_of_two_near, side_term_factors, term_means
from mtrain.loss.pair import MAIN_TERM, LossPair, TermInputs
from mtrain.loss.router import ROUTER_TERMS, router_denominator
from mtrain.loss.scaling import check_denominator, check_factors
from mtrain.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.mcore.distributed.broadcast import broadcast_batches, slice_for_rank
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine.finalize import Finalizer
from mtrain.mcore.engine.loss_reduction import (
    GlobalTotals,
    HostTotals,
    PairAccumulator,
    PlannedTotals,
    TermTotals,
    TokenCounts,
)
from mtrain.mcore.engine.optimizer import Optimizer, Update
from mtrain.mcore.engine.schedule import connect, run_forward, run_schedule
from mtrain.mcore.model.moe.balance import RouterBalance
from mtrain.mcore.model.mtp import Logits
from mtrain.mcore.state.teacher import Teacher

_WEIGHT_TOLERANCE = 1e-12
"""Relative difference allowed between planned and measured denominators: rounding of float64 sums of fractional
weights. Counts are below 1e12, where this means equality."""


@dataclass(frozen=True)
class StepTotals:
    """The loss of a global batch, the same on all ranks."""

    means: Mapping[str, float]
    """Each term's numerator / denominator, in nats; 0 where the denominator is 0."""
    objective: float
    """Sum over terms of coefficient x numerator / denominator: the very quantity that was differentiated."""
    terms: Mapping[str, TermTotals]
    stop_requested: bool
    """Whether any rank raised its stop_requested for this step."""
    tokens: TokenCounts
    """Of the global batch."""
    grad_norm: float | None
    """Global L2 norm of the normalised gradient, before clipping; None in fp16, where the update finds it."""

    @property
    def loss(self) -> float:
        """The main term's mean."""
        return self.means[MAIN_TERM]

    @property
    def is_empty(self) -> bool:
        """Nothing to learn: the main denominator is 0."""
        return self.terms[MAIN_TERM].denominator == 0


class TrainingStep:
    """Runs steps of one model; holds no state of its own."""

    def __init__(
        self,
        config: Config,
        groups: Groups,
        chunks: Sequence[Any],
        optimizer: Optimizer,
        objective: Objective,
        teacher: Teacher | None = None,
    ) -> None:
        """Args:
        config: The configuration.
        groups: The process groups.
        chunks: This rank's model chunks.
        optimizer: Theirs.
        objective: What is minimised.
        teacher: Where a term of the objective needs one.
        """
        self._config, self._groups, self._chunks = config, groups, list(chunks)
        self._optimizer, self._objective, self._teacher = optimizer, objective, teacher
        self._terms = tuple(objective.functions)
        self._num_microbatches = groups.layout.num_microbatches(
            config.train.global_batch_size, config.train.micro_batch_size
        )
        self.routers = RouterBalance(config, groups, self._chunks)
        connect(self._chunks, optimizer, config)

    def forward_backward(self, batches: Sequence[Microbatch] | None, stop_requested: bool = False) -> StepTotals:
        """Accumulates, reduces and normalises the gradients of one global batch.

        One collective of a short float64 vector over all ranks carries both the losses and the gradient norm; a second
        one, beside the first forward pass, where terms of several denominators (within each pipeline stage) or fp16
        need the plan. The host waits for the device once, at the end; in fp16 once more for the plan.

        Args:
            batches: This data-parallel rank's microbatches, full rows; None on ranks that do not read data
                (tensor-parallel rank > 0).
            stop_requested: Joined over all ranks into `StepTotals.stop_requested`.

        Raises:
            NumericError: A denominator is not what the batch planned, negative, not finite or beyond what float32
                carries, or a loss is not finite; on all ranks alike.
        """
        planned = list(planned_denominators(batches or [], tuple(self._objective.coefficients)).values())
        plan = Plan(planned, self._objective, self._optimizer.unscales, self._groups)
        rows = slice_for_rank(
            broadcast_batches(batches, self._num_microbatches, self._terms, self._config, self._groups), self._groups
        )
        accumulator = PairAccumulator(self._terms, self._groups.device, self._objective.router_terms)
        local_grad_norm_sq = None if self._optimizer.unscales else self._optimizer.local_grad_norm_sq
        tokens = token_counts(batches or [])
        finalizer = Finalizer(
            accumulator, planned, stop_requested, plan.numerator_scale, self._groups, local_grad_norm_sq, tokens
        )
        inputs_of = term_inputs_of(rows, self._config, self._groups, self._teacher)

        def loss(logits: Logits, batch: Microbatch) -> tuple[Tensor, Mapping[str, LossPair]]:
            pairs = self._objective.pairs(inputs_of(logits, batch))
            return self._objective.scalar(pairs, plan.factors(), plan.numerator_scale), pairs

        self._optimizer.zero_grad()
        router_factors = functools.cache(lambda: self._optimizer.scale_loss(plan.router_factors()))
        with self.routers.watching(accumulator, router_factors):
            run_schedule(self._chunks, rows, loss, accumulator, self._config, finalizer)
        plan.wait()
        assert finalizer.totals is not None
        totals = finalizer.totals.read()
        totals = totals._replace(terms=self.routers.per_layer(totals.terms))
        self.check(totals.terms)
        return self._totals(totals)

    def check(self, terms: Mapping[str, TermTotals]) -> None:
        """Raises NumericError where a total cannot be right, on all ranks alike."""
        check_totals(terms, compare_with_plan=self._config.loss.denominator == "planned")
        denominators = {term: each.denominator for term, each in terms.items()}
        check_factors(self._objective.coefficients, denominators)

    def update(self, totals: StepTotals, lr: float) -> Update | None:
        """The optimizer step, and where it succeeded that of the experts' biases.

        None where the batch was empty: weights and state stay bit-identical.
        """
        if totals.is_empty:
            return None
        if totals.grad_norm is None:
            update = self._optimizer.unscale_and_update(lr)
        else:
            update = self._optimizer.update(lr, totals.grad_norm)
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
        model = (self._config, self._groups, self._chunks, self._optimizer, self._objective)
        forward_totals(*model, [batches], self._teacher)

    def _totals(self, totals: HostTotals) -> StepTotals:
        numerators = {term: each.numerator for term, each in totals.terms.items()}
        denominators = {term: each.denominator for term, each in totals.terms.items()}
        divisor = denominators[MAIN_TERM] or math.inf  # an empty batch has no gradient
        return StepTotals(
            means=term_means(numerators, denominators),
            objective=self._objective.reported(numerators, denominators),
            terms=totals.terms,
            stop_requested=totals.stop_requested,
            tokens=totals.tokens,
            grad_norm=None if totals.local_grad_norm_sq is None else math.sqrt(totals.local_grad_norm_sq) / divisor,
        )


class Plan:
    """How numerators are scaled before backward, from the planned denominators of the whole global batch.

    In fp32 and bf16 nothing is communicated where all terms have one denominator: their coefficients are the factors.
    """

    def __init__(self, planned: Sequence[float], objective: Objective, is_fp16: bool, groups: Groups) -> None:
        """Args:
        planned: The denominator of each term over this rank's batch.
        objective: The terms.
        is_fp16: Gradients are kept near 1 by a numerator_scale, an exact power of two that all stages must agree on.
            One host synchronisation.
        groups: The process groups.
        """
        self._coefficients, self._router_terms = objective.coefficients, objective.router_terms
        is_needed = is_fp16 or bool(objective.apart)
        self._totals = PlannedTotals(planned, groups, everywhere=is_fp16) if is_needed else None
        self._factors: Mapping[str, float | Tensor] | None = None
        self.numerator_scale = self._power_of_two() if is_fp16 else 1.0

    def factors(self) -> Mapping[str, float | Tensor]:
        """One a side term; first called after the first forward pass of the last stage, or by the first router."""
        if self._totals is None:
            return self._coefficients
        if self._factors is None:
            self._factors = side_term_factors(self._totals.on_device(), self._coefficients)
        return self._factors

    def router_factors(self) -> Tensor:
        """[router_terms] float64 on the device, the numerator_scale in them; first called in the first forward pass."""
        factors = self.factors()
        return torch.stack([torch.as_tensor(factors[term]) for term in self._router_terms]) * self.numerator_scale

    def wait(self) -> None:
        """Ends the collective on ranks that have asked for no factor."""
        if self._totals is not None:
            self._totals.on_device()

    def _power_of_two(self) -> float:
        assert self._totals is not None
        main = float(self._totals.on_device()[0])
        return power_of_two_near(1 / main) if math.isfinite(main) and main > 0 else 1.0


def planned_denominators(batches: Sequence[Microbatch], terms: Sequence[str]) -> dict[str, float]:
    """Each term's denominator over this data-parallel rank's full rows, known before the forward pass."""
    padding = [batch.is_padding for batch in batches if batch.is_padding is not None]
    return {
        term: router_denominator(term, padding)
        if term in ROUTER_TERMS
        else math.fsum(batch.denominator_weights[term].numpy().sum() for batch in batches)
        for term in terms
    }


InputsOf = Callable[[Logits, Microbatch], dict[str, TermInputs]]
"""(logits, sliced microbatch) -> what each term's loss function sees."""


def token_counts(batches: Sequence[Microbatch]) -> TokenCounts:
    """Of full rows, as the loader counted them."""
    padding = sum(batch.num_padding_tokens for batch in batches)
    return TokenCounts(padding, sum(batch.num_loss_tokens for batch in batches))


def term_inputs_of(
    batches: Sequence[Microbatch], config: Config, groups: Groups, teacher: Teacher | None = None
) -> InputsOf:
    """`term_inputs` for every microbatch of one pass, with the teacher's logits where there is a teacher.

    Args:
        batches: All microbatches of the pass, sliced for context parallelism; a teacher behind a pipeline runs now.
        config: The configuration.
        groups: The process groups.
        teacher: Where a term needs one.
    """
    if teacher is None:
        return lambda logits, batch: term_inputs(logits, batch, config, groups)
    teacher_logits = teacher.logits_of(batches)
    return lambda logits, batch: term_inputs(logits, batch, config, groups, teacher_logits(batch))


def term_inputs(
    logits: Logits, batch: Microbatch, config: Config, groups: Groups, teacher_logits: Tensor | None = None
) -> dict[str, TermInputs]:
    """What each term's loss function sees of a sliced microbatch; the softmax is computed once for all, and once more
    for each depth of multi-token prediction.

    Args:
        logits: Of the last stage.
        batch: The microbatch, sliced for context parallelism.
        config: The vocabulary's real size.
        groups: Of the vocabulary's other parts and of the sequences' other tokens.
        teacher_logits: Shaped as `logits.main`, where a term needs them.
    """
    group = groups.tp if groups.layout.tp > 1 else None
    first_index = groups.tp_rank * logits.main.shape[-1]

    def distribution(local: Tensor) -> VocabParallelLogits:
        return VocabParallelLogits(local, group, first_index, config.model.vocab_size)

    student, teacher = distribution(logits.main), None if teacher_logits is None else distribution(teacher_logits)
    context = groups.cp if groups.layout.cp > 1 else None
    terms = loss_terms(config.loss)
    inputs = {
        term: TermInputs(
            student,
            batch.labels,
            batch.weights[term],
            batch.denominator_weights[term],
            batch.tokens,
            teacher,
            context,
            terms.get(term, config.loss).aggregation,  # depths of multi-token prediction: as the main term
        )
        for term in batch.weights
    }
    for depth, (local, ahead) in enumerate(zip(logits.mtp, batch.mtp, strict=True), start=1):
        term = depth_term(depth)
        inputs[term] = replace(
            inputs[term], logits=distribution(local), labels=ahead.labels, tokens=ahead.tokens, teacher=None
        )
    return inputs


def forward_totals(
    config: Config,
    groups: Groups,
    chunks: Sequence[Any],
    optimizer: Optimizer,
    objective: Objective,
    passes: Iterable[Sequence[Microbatch] | None],
    teacher: Teacher | None = None,
) -> dict[str, TermTotals]:
    """Every term of logits over some batches, forward only; those of routers belong to training.

    One all-reduce of a short vector at the end, beside megatron-core's own collectives.

    Args:
        config: The configuration.
        groups: The process groups.
        chunks: This rank's model chunks; left in training mode.
        optimizer: Completes the parameters first.
        objective: The terms.
        passes: What this rank reads for each pass through the schedule, as many on all ranks; None where it reads none.
        teacher: Where a term needs one.

    Raises:
        NumericError: As in training.
    """
    optimizer.gather_parameters()
    terms = tuple(objective.functions)
    num_microbatches = groups.layout.num_microbatches(config.train.global_batch_size, config.train.micro_batch_size)
    accumulator = PairAccumulator(terms, groups.device)
    planned = dict.fromkeys(terms, 0.0)

    def accumulate(rows: Sequence[Microbatch], inputs_of: InputsOf) -> None:
        run_forward(chunks, rows, lambda *output: accumulator.add(objective.pairs(inputs_of(*output))), config)

    _set_training(chunks, False)
    try:
        for own in passes:
            for term, value in planned_denominators(own or [], terms).items():
                planned[term] += value
            rows = slice_for_rank(broadcast_batches(own, num_microbatches, terms, config, groups), groups)
            accumulate(rows, term_inputs_of(rows, config, groups, teacher))
    finally:
        _set_training(chunks, True)
    totals = GlobalTotals(accumulator, list(planned.values()), False, groups).read().terms
    check_totals(totals, compare_with_plan=config.loss.denominator == "planned")
    return totals


def _set_training(chunks: Sequence[torch.nn.Module], training: bool) -> None:
    for chunk in chunks:
        chunk.train(training)


def check_totals(terms: Mapping[str, TermTotals], compare_with_plan: bool) -> None:
    """Raises NumericError where a total cannot be right; the totals are the same on all ranks, so all raise."""
    for term, totals in terms.items():
        if not (math.isfinite(totals.denominator) and totals.denominator >= 0):
            raise NumericError(
                f"the denominator of loss term {term!r} is {totals.denominator}, but must be finite and not negative; "
                "look at the sample weights of the data"
            )
        if not math.isfinite(totals.numerator):
            raise NumericError(f"the loss of term {term!r} is {totals.numerator}")
        difference = abs(totals.denominator - totals.planned)
        if compare_with_plan and difference > _WEIGHT_TOLERANCE * abs(totals.planned):
            raise NumericError(
                f"the denominator of loss term {term!r} was measured as {totals.denominator!r}, but the batch planned "
                f"{totals.planned!r}: a loss function counts other tokens than its mask says; set "
                "loss.denominator=measured if the mask depends on model outputs"
            )
        check_denominator(term, totals.denominator)
