"""Validation: sum over sum over exactly the samples of a set."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtrain.config import Config
from mtrain.data.batch import Microbatch
from mtrain.data.loader import HeldOutBatches, StepLoader
from mtrain.loss.pair import MAIN_TERM
from mtrain.loss.terms import Objective
from mtrain.mcore.groups import Groups
from mtrain.mcore.optimizer import Optimizer
from mtrain.mcore.pairs import GlobalTotals, PairAccumulator, TermTotals
from mtrain.mcore.schedule import run_forward
from mtrain.mcore.share import share_batches, slice_for_rank
from mtrain.mcore.teacher import Teacher
from mtrain.mcore.world import on_first_rank
from mtrain.metrics.record import TermRecord, ValidRecord
from mtrain.step import InputsOf, check_totals, planned_denominators, term_inputs_of


@dataclass(frozen=True)
class ValidationSet:
    """A held-out set as this rank sees it."""

    held_out: HeldOutBatches | None
    """None on ranks that do not read data."""
    num_passes: int
    """Passes through the schedule, the same on all ranks."""
    num_samples: int
    """Samples of the set, over all ranks."""

    @classmethod
    def open(cls, loader: StepLoader | None) -> ValidationSet | None:
        """The validation set of the configuration; None where it has none. Collective over the world."""
        held_out = None if loader is None else loader.held_out("valid")
        size = on_first_rank(lambda: None if held_out is None else (held_out.num_passes, held_out.num_samples))
        return None if size is None else cls(held_out, *size)


def evaluate(
    config: Config,
    groups: Groups,
    chunks: Sequence[Any],
    optimizer: Optimizer,
    objective: Objective,
    samples: ValidationSet,
    step: int,
    teacher: Teacher | None = None,
) -> ValidRecord:
    """Runs the set through the pipeline, forward only.

    One all-reduce of a short vector at the end, beside megatron-core's own collectives.

    Args:
        config: The configuration.
        groups: The process groups.
        chunks: This rank's model chunks; left in training mode.
        optimizer: Completes the parameters first.
        objective: Every term of logits is reported, the main one as the validation loss.
        samples: The set.
        step: Optimizer updates completed.
        teacher: Where a term needs one.

    Raises:
        NumericError: As in training.
    """
    start = time.perf_counter()
    optimizer.gather_parameters()
    terms = tuple(objective.functions)  # those of routers belong to training
    num_microbatches = groups.layout.num_microbatches(config.train.global_batch_size, config.train.micro_batch_size)
    accumulator = PairAccumulator(terms, groups.device)
    planned = dict.fromkeys(terms, 0.0)

    def accumulate(rows: Sequence[Microbatch], inputs_of: InputsOf) -> None:
        run_forward(chunks, rows, lambda *output: accumulator.add(objective.pairs(inputs_of(*output))), config)

    batches = None if samples.held_out is None else samples.held_out.batches()
    _set_training(chunks, False)
    try:
        for _ in range(samples.num_passes):
            own = None if batches is None else next(batches)
            for term, value in planned_denominators(own or [], terms).items():
                planned[term] += value
            rows = slice_for_rank(share_batches(own, num_microbatches, terms, config, groups), groups)
            accumulate(rows, term_inputs_of(rows, config, groups, teacher))
    finally:
        _set_training(chunks, True)
    totals = GlobalTotals(accumulator, list(planned.values()), False, groups).read().terms
    check_totals(totals, compare_with_plan=config.loss.denominator == "planned")
    return _record(config, totals, samples, step, time.perf_counter() - start)


def _record(
    config: Config, totals: Mapping[str, TermTotals], samples: ValidationSet, step: int, seconds: float
) -> ValidRecord:
    records = term_records(totals)
    return ValidRecord(
        step=step,
        valid_loss=records[MAIN_TERM].loss,
        denominator=records[MAIN_TERM].denominator,
        samples=samples.num_samples,
        seconds=seconds,
        terms=records,
        layout_dependent=config.is_layout_dependent,
    )


def term_records(totals: Mapping[str, TermTotals]) -> dict[str, TermRecord]:
    """Each term as sum over sum, for the metrics; the mean of an empty term is 0."""
    return {
        term: TermRecord(
            loss=each.numerator / each.denominator if each.denominator else 0.0,
            numerator=each.numerator,
            denominator=each.denominator,
        )
        for term, each in totals.items()
    }


def _set_training(chunks: Sequence[torch.nn.Module], training: bool) -> None:
    for chunk in chunks:
        chunk.train(training)
