"""Validation: sum over sum over exactly the samples of a set."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from mtrain.config import Config
from mtrain.data.loader import HeldOutBatches, StepLoader
from mtrain.loss.objective import Objective
from mtrain.loss.pair import MAIN_TERM
from mtrain.mcore.distributed.init import on_first_rank
from mtrain.mcore.engine.loss_reduction import Totals
from mtrain.mcore.engine.rank_model import RankModel
from mtrain.mcore.state.teacher import Teacher
from mtrain.metrics.record import TermRecord, ValidRecord
from mtrain.training.forward import ForwardTotals, forward_totals


@dataclass(frozen=True)
class ValidationSet:
    """A held-out set as this rank sees it."""

    name: str
    held_out: HeldOutBatches | None
    """None on ranks that do not read data."""
    num_passes: int
    """Passes through the schedule, the same on all ranks."""
    num_samples: int
    """Samples of the set, over all ranks."""

    @classmethod
    def open_all(cls, loader: StepLoader | None) -> tuple[ValidationSet, ...]:
        """The validation sets of the configuration, in its order. Collective over the world."""
        own = {} if loader is None else loader.held_out_sets("valid")
        # ranks without data need the number of passes, or they would wait in a pass that others do not make
        sizes = on_first_rank(lambda: {name: (each.num_passes, each.num_samples) for name, each in own.items()})
        return tuple(cls(name, own.get(name), *size) for name, size in sizes.items())


def evaluate_all(
    model: RankModel,
    objective: Objective,
    sets: Sequence[ValidationSet],
    step: int,
    teacher: Teacher | None = None,
) -> ValidRecord:
    """Evaluates several sets one after the other, as `evaluate` does.

    Args:
        model: As for `evaluate`.
        objective: As for `evaluate`.
        sets: At least one.
        step: Optimizer updates completed.
        teacher: Where a term needs one.

    Returns:
        The record of the first set, in whose `valid_sets` the losses of all sets stand where there are several.
    """
    records = {each.name: evaluate(model, objective, each, step, teacher) for each in sets}
    first, *others = records.values()
    if not others:
        return first
    losses = {name: record.terms[MAIN_TERM] for name, record in records.items()}
    return replace(first, valid_sets=losses, seconds=sum(record.seconds for record in records.values()))


def evaluate(
    model: RankModel,
    objective: Objective,
    samples: ValidationSet,
    step: int,
    teacher: Teacher | None = None,
) -> ValidRecord:
    """Runs the set through the pipeline, forward only.

    One all-reduce of a short vector at the end, beside megatron-core's own collectives.

    Args:
        model: Its parameters are completed first, and it is left in training mode.
        objective: Every term of logits is reported, the main one as the validation loss.
        samples: The set.
        step: Optimizer updates completed.
        teacher: Where a term needs one.

    Raises:
        NumericError: As in training.
    """
    start, held_out = time.perf_counter(), samples.held_out
    passes = repeat(None, samples.num_passes) if held_out is None else held_out.batches()
    totals = forward_totals(model, objective, passes, teacher)
    return _record(model.config, totals, samples, step, time.perf_counter() - start)


def _record(config: Config, totals: ForwardTotals, samples: ValidationSet, step: int, seconds: float) -> ValidRecord:
    records = term_records(totals.terms)
    return ValidRecord(
        step=step,
        valid_loss=records[MAIN_TERM].loss,
        denominator=records[MAIN_TERM].denominator,
        samples=samples.num_samples,
        seconds=seconds,
        terms=records,
        diagnostics=totals.diagnostics,
        layout_dependent=config.is_layout_dependent,
    )


def term_records(totals: Mapping[str, Totals]) -> dict[str, TermRecord]:
    """Each term as sum over sum, for the metrics; the mean of an empty term is 0."""
    return {
        term: TermRecord(
            loss=each.mean,
            numerator=each.numerator,
            denominator=each.denominator,
        )
        for term, each in totals.items()
    }
