"""Validation: sum over sum over exactly the samples of a set."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtrain.config import Config
from mtrain.data.batch import Microbatch
from mtrain.data.loader import HeldOutBatches, StepLoader
from mtrain.loss.pair import MAIN_TERM, LossPair
from mtrain.loss.terms import Objective
from mtrain.mcore.groups import Groups
from mtrain.mcore.optimizer import Optimizer
from mtrain.mcore.pairs import GlobalTotals, PairAccumulator
from mtrain.mcore.schedule import run_schedule
from mtrain.mcore.share import share_batches, slice_for_rank
from mtrain.mcore.world import on_first_rank
from mtrain.metrics.record import ValidRecord
from mtrain.step import check_totals, planned_denominators, term_inputs


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
) -> ValidRecord:
    """Runs the set through the pipeline, forward only.

    One all-reduce of a short vector at the end, beside megatron-core's own collectives.

    Args:
        config: The configuration.
        groups: The process groups.
        chunks: This rank's model chunks; left in training mode.
        optimizer: Completes the parameters first.
        objective: The main term is reported.
        samples: The set.
        step: Optimizer updates completed.

    Raises:
        NumericError: As in training.
    """
    start = time.perf_counter()
    optimizer.gather_parameters()
    terms = tuple(objective.coefficients)
    num_microbatches = groups.layout.num_microbatches(config.train.global_batch_size, config.train.micro_batch_size)
    accumulator = PairAccumulator(terms, groups.device)
    planned = dict.fromkeys(terms, 0.0)

    def loss(logits: Tensor, batch: Microbatch) -> tuple[Tensor, Mapping[str, LossPair]]:
        pairs = objective.pairs(term_inputs(logits, batch, config, groups))
        return pairs[MAIN_TERM].numerator, pairs

    batches = None if samples.held_out is None else samples.held_out.batches()
    _set_training(chunks, False)
    try:
        for _ in range(samples.num_passes):
            own = None if batches is None else next(batches)
            for term, value in planned_denominators(own or [], terms).items():
                planned[term] += value
            rows = slice_for_rank(share_batches(own, num_microbatches, terms, config, groups), groups)
            run_schedule(chunks, rows, loss, accumulator, config, finalizer=None)
    finally:
        _set_training(chunks, True)
    totals, _ = GlobalTotals(accumulator, list(planned.values()), False, groups).read()
    check_totals(totals, compare_with_plan=config.loss.denominator == "planned")
    main = totals[MAIN_TERM]
    return ValidRecord(
        step=step,
        valid_loss=main.numerator / main.denominator if main.denominator else 0.0,
        denominator=main.denominator,
        samples=samples.num_samples,
        seconds=time.perf_counter() - start,
    )


def _set_training(chunks: Sequence[torch.nn.Module], training: bool) -> None:
    for chunk in chunks:
        chunk.train(training)
