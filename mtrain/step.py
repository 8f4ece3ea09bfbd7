"""One training step: plan, pipeline schedule, one division, guard, update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mtrain.config import Config
from mtrain.data.batch import Microbatch
from mtrain.errors import NumericError
from mtrain.loss.pair import MAIN_TERM, LossPair, TermInputs
from mtrain.loss.terms import Objective, power_of_two_near, side_term_factors, term_means
from mtrain.loss.vocab_parallel import VocabParallelLogits
from mtrain.mcore.finalize import Finalizer
from mtrain.mcore.groups import Groups
from mtrain.mcore.optimizer import Optimizer, Update
from mtrain.mcore.pairs import PairAccumulator, TermTotals, sum_over_world
from mtrain.mcore.schedule import connect, run_schedule
from mtrain.mcore.share import share_batches, slice_for_rank

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
    flag: bool
    """Whether any rank raised its flag for this step."""

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
        self, config: Config, groups: Groups, chunks: Sequence[Any], optimizer: Optimizer, objective: Objective
    ) -> None:
        self._config, self._groups, self._chunks = config, groups, list(chunks)
        self._optimizer, self._objective = optimizer, objective
        self._terms = tuple(objective.coefficients)
        self._num_microbatches = groups.layout.num_microbatches(
            config.train.global_batch_size, config.train.micro_batch_size
        )
        connect(self._chunks, optimizer, config)

    def forward_backward(self, batches: Sequence[Microbatch] | None, flag: bool = False) -> StepTotals:
        """Accumulates, reduces and normalises the gradients of one global batch.

        One all-reduce of a short float64 vector over all ranks, beside megatron-core's own collectives; a second one
        before the forward pass where side terms or fp16 need the planned denominators.

        Args:
            batches: This data-parallel rank's microbatches, full rows; None on ranks that do not read data
                (tensor-parallel rank > 0).
            flag: Joined over all ranks into `StepTotals.flag`.

        Raises:
            NumericError: A denominator is not what the batch planned, negative or not finite, or a loss is not finite;
                on all ranks alike.
        """
        planned = planned_denominators(batches or [], self._terms)
        factors, premultiplier = self._factors(planned)
        rows = slice_for_rank(
            share_batches(batches, self._num_microbatches, self._terms, self._config, self._groups), self._groups
        )
        accumulator = PairAccumulator(self._terms, self._groups.device)
        finalizer = Finalizer(accumulator, list(planned.values()), flag, premultiplier, self._groups)

        def loss(logits: Tensor, batch: Microbatch) -> tuple[Tensor, Mapping[str, LossPair]]:
            pairs = self._objective.pairs(term_inputs(logits, batch, self._config, self._groups))
            return self._objective.scalar(pairs, factors, premultiplier), pairs

        self._optimizer.zero_grad()
        run_schedule(self._chunks, rows, loss, accumulator, self._config, finalizer)
        assert finalizer.totals is not None
        terms, joined = finalizer.totals.read()
        self.check(terms)
        return self._totals(terms, joined)

    def check(self, terms: Mapping[str, TermTotals]) -> None:
        """Raises NumericError where a total cannot be right, on all ranks alike."""
        check_totals(terms, compare_with_plan=self._config.loss.denominator == "planned")

    def update(self, totals: StepTotals, lr: float) -> Update | None:
        """The optimizer step; None where the batch was empty: weights and state stay bit-identical."""
        return None if totals.is_empty else self._optimizer.update(lr)

    def _totals(self, terms: Mapping[str, TermTotals], flag: bool) -> StepTotals:
        numerators = {term: totals.numerator for term, totals in terms.items()}
        denominators = {term: totals.denominator for term, totals in terms.items()}
        objective = self._objective.reported(numerators, denominators)
        return StepTotals(term_means(numerators, denominators), objective, terms, flag)

    def _factors(self, planned: Mapping[str, float]) -> tuple[dict[str, float], float]:
        """Side-term factors and the fp16 premultiplier, from the plan of the whole global batch."""
        is_half = self._config.train.precision == "fp16"
        if len(self._terms) == 1 and not is_half:
            return {}, 1.0
        local = [value if self._groups.owns_plan else 0.0 for value in planned.values()]
        world = dict(zip(planned, sum_over_world(local, self._groups.device)))
        main = world[MAIN_TERM]
        usable = is_half and math.isfinite(main) and main > 0
        return side_term_factors(world, self._objective.coefficients), power_of_two_near(1 / main) if usable else 1.0


def planned_denominators(batches: Sequence[Microbatch], terms: Sequence[str]) -> dict[str, float]:
    """Each term's denominator over this data-parallel rank's full rows, known before the forward pass."""
    return {term: math.fsum(float(batch.shares[term].sum()) for batch in batches) for term in terms}


def term_inputs(logits: Tensor, batch: Microbatch, config: Config, groups: Groups) -> dict[str, TermInputs]:
    """What each term's loss function sees of a sliced microbatch; the softmax is computed once for all.

    Args:
        logits: [seq_local, batch, vocab_local].
        batch: The microbatch, sliced for context parallelism.
        config: The vocabulary's real size.
        groups: The tensor-parallel group.
    """
    shared = VocabParallelLogits(
        logits,
        group=groups.tp if groups.layout.tp > 1 else None,
        first_index=groups.tp_rank * logits.shape[-1],
        vocab_size=config.model.vocab_size,
    )
    return {
        term: TermInputs(shared, batch.labels, batch.weights[term], batch.shares[term], batch.tokens)
        for term in batch.weights
    }


def check_totals(terms: Mapping[str, TermTotals], compare_with_plan: bool) -> None:
    """Raises NumericError where a total cannot be right; the totals are the same on all ranks, so all raise."""
    for term, totals in terms.items():
        if not (math.isfinite(totals.denominator) and totals.denominator >= 0):
            raise NumericError(
                f"the denominator of loss term {term!r} is {totals.denominator}, but must be finite and not negative; "
                "look at the sample weights of the data"
            )
        if not math.isfinite(totals.numerator):
            raise NumericError(f"the loss of term {term!r} is {totals.numerator}; the weights were not updated")
        difference = abs(totals.denominator - totals.planned)
        if compare_with_plan and difference > _WEIGHT_TOLERANCE * abs(totals.planned):
            raise NumericError(
                f"the denominator of loss term {term!r} was measured as {totals.denominator!r}, but the batch planned "
                f"{totals.planned!r}: a loss function counts other tokens than its mask says; set "
                "loss.denominator=measured if the mask depends on model outputs"
            )
