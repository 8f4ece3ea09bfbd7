"""Validation: when it is due, and its loss, one sum divided by one sum over exactly the samples of a set."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple

from mtrain.config.schema.loss import MAIN_TERM
from mtrain.config.schema.train import EvalSection, ValidSection
from mtrain.core.engine.loss_reduction import Totals
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.init import on_first_rank
from mtrain.core.step.forward import forward_totals
from mtrain.core.step.teacher import Teacher
from mtrain.data.loader import HeldOutBatches, StepLoader
from mtrain.report.metrics.record import TermRecord, ValidRecord


class Due(NamedTuple):
    """Steps after which an action, such as validation, is due."""

    every: int = 0
    """Interval in steps; 0: only at start or end, as the other fields say."""
    at_end: bool = False
    """Whether it is due after the last step, whatever the interval."""
    at_start: bool = False
    """Whether it is due before the first step, that is after step 0."""

    def after(self, step: int, last: int) -> bool:
        """Says whether it is due after a step of a run with `last` steps."""
        if step == 0:
            return self.at_start
        return (self.every > 0 and step % self.every == 0) or (self.at_end and step == last)


def due_of_eval(evaluation: EvalSection, valid: ValidSection) -> Due:
    """Returns when prompts and tasks are due: at their own interval, or with each validation."""
    if evaluation.interval_steps is not None:
        return Due(evaluation.interval_steps)
    return Due(valid.interval_steps, valid.at_end, valid.at_start)


@dataclass(frozen=True)
class ValidationSet:
    """A held-out set, with the batches of this rank."""

    name: str
    held_out: HeldOutBatches | None
    """Batches of this rank; None on ranks that do not read data."""
    num_passes: int
    """Number of calls of the pipeline schedule, the same on all ranks."""
    num_samples: int
    """Number of samples of the set, over all ranks."""

    @classmethod
    def open_all(cls, loader: StepLoader | None) -> tuple[ValidationSet, ...]:
        """Opens the validation sets of the configuration, in its order. Collective over the world."""
        sets = {} if loader is None else loader.held_out_sets("valid")
        # ranks without data need the number of passes: one too many would wait forever
        sizes = on_first_rank(lambda: {name: (part.num_passes, part.num_samples) for name, part in sets.items()})
        return tuple(cls(name, sets.get(name), *size) for name, size in sizes.items())


def evaluate_all(
    model: RankModel, objective: Objective, sets: Sequence[ValidationSet], step: int, teacher: Teacher | None = None
) -> ValidRecord:
    """Evaluates validation sets one after the other, forward only. Collective over the world.

    One all-reduce of a short vector for each set, in addition to megatron-core's own collectives.

    Args:
        model: Model of this rank; its parameters are gathered first, and it is left in training mode.
        objective: Objective whose terms of logits are reported, the main term as the validation loss.

    Returns:
        Record of the first set; with several sets, its `valid_sets` has the losses of all of them.
    """
    records: dict[str, ValidRecord] = {}
    for valid_set in sets:
        start = time.perf_counter()
        passes = repeat(None, valid_set.num_passes) if valid_set.held_out is None else valid_set.held_out.batches()
        totals = forward_totals(model, objective, passes, teacher)
        terms = term_records(totals.terms)
        records[valid_set.name] = ValidRecord(
            step=step,
            valid_loss=terms[MAIN_TERM].loss,
            denominator=terms[MAIN_TERM].denominator,
            samples=valid_set.num_samples,
            seconds=time.perf_counter() - start,
            terms=terms,
            diagnostics=totals.diagnostics,
            layout_dependent=model.config.is_layout_dependent,
        )
    first, *more = records.values()
    if not more:
        return first
    losses = {name: record.terms[MAIN_TERM] for name, record in records.items()}
    return replace(first, valid_sets=losses, seconds=sum(record.seconds for record in records.values()))


def term_records(totals: Mapping[str, Totals]) -> dict[str, TermRecord]:
    """Returns the records of all terms for the metrics; the mean of an empty term is 0."""
    return {
        term: TermRecord(loss=term_totals.mean, numerator=term_totals.numerator, denominator=term_totals.denominator)
        for term, term_totals in totals.items()
    }
