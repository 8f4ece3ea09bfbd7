"""Validation: when it is due, and a loss that is one sum over one sum, over exactly the samples of a set."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple

from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.engine.loss_reduction import Totals
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.init import on_first_rank
from mtrain.core.step.forward import forward_totals
from mtrain.core.step.teacher import Teacher
from mtrain.data.loader import HeldOutBatches, StepLoader
from mtrain.report.metrics.record import TermRecord, ValidRecord


class Due(NamedTuple):
    """Steps after which something happens."""

    every: int = 0
    """Number of steps from one time to the next; 0: only where the others say so."""
    at_end: bool = False
    """Whether it happens after the last step, whatever its number."""
    at_start: bool = False
    """Whether it happens before the first step, which is step 0."""

    def after(self, step: int, last: int) -> bool:
        """Says whether it happens after a step of a run with `last` steps."""
        if step == 0:
            return self.at_start
        return (self.every > 0 and step % self.every == 0) or (self.at_end and step == last)


@dataclass(frozen=True)
class ValidationSet:
    """A held-out set as this rank sees it."""

    name: str
    held_out: HeldOutBatches | None
    """Batches of this rank; None on ranks that do not read data."""
    num_passes: int
    """Number of passes through the schedule, the same on all ranks."""
    num_samples: int
    """Number of samples of the set, over all ranks."""

    @classmethod
    def open_all(cls, loader: StepLoader | None) -> tuple[ValidationSet, ...]:
        """Opens the validation sets of the configuration, in its order. Collective over the world."""
        own = {} if loader is None else loader.held_out_sets("valid")
        # ranks without data need the number of passes: in one too many they would wait for ever
        sizes = on_first_rank(lambda: {name: (each.num_passes, each.num_samples) for name, each in own.items()})
        return tuple(cls(name, own.get(name), *size) for name, size in sizes.items())


def evaluate_all(
    model: RankModel, objective: Objective, sets: Sequence[ValidationSet], step: int, teacher: Teacher | None = None
) -> ValidRecord:
    """Runs several sets through the pipeline one after the other, forward only; returns the record of the first set,
    whose `valid_sets` holds the losses of all if there are several.

    One all-reduce of a short vector for each set, in addition to megatron-core's own collectives.

    Args:
        model: Model of this rank; its parameters are gathered first, and it is left in training mode.
        objective: Objective whose terms of logits are reported, the main term as the validation loss.
    """
    records: dict[str, ValidRecord] = {}
    for each in sets:
        start = time.perf_counter()
        passes = repeat(None, each.num_passes) if each.held_out is None else each.held_out.batches()
        totals = forward_totals(model, objective, passes, teacher)
        terms = term_records(totals.terms)
        records[each.name] = ValidRecord(
            step=step,
            valid_loss=terms[MAIN_TERM].loss,
            denominator=terms[MAIN_TERM].denominator,
            samples=each.num_samples,
            seconds=time.perf_counter() - start,
            terms=terms,
            diagnostics=totals.diagnostics,
            layout_dependent=model.config.is_layout_dependent,
        )
    first, *others = records.values()
    if not others:
        return first
    losses = {name: record.terms[MAIN_TERM] for name, record in records.items()}
    return replace(first, valid_sets=losses, seconds=sum(record.seconds for record in records.values()))


def term_records(totals: Mapping[str, Totals]) -> dict[str, TermRecord]:
    """Returns the records of all terms for the metrics; the mean of an empty term is 0."""
    return {
        term: TermRecord(loss=each.mean, numerator=each.numerator, denominator=each.denominator)
        for term, each in totals.items()
    }
