"""Validation: sum over sum over exactly the samples of a set."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mtrain.config import Config
from mtrain.data.batch import Microbatch
from mtrain.loss.pair import MAIN_TERM, LossPair
from mtrain.loss.terms import Objective
from mtrain.mcore.groups import Groups
from mtrain.mcore.optimizer import Optimizer
from mtrain.mcore.pairs import GlobalTotals, PairAccumulator
from mtrain.mcore.schedule import run_schedule
from mtrain.mcore.share import share_batches, slice_for_rank
from mtrain.metrics.record import ValidRecord
from mtrain.step import check_totals, planned_denominators, term_inputs


def evaluate(
    config: Config,
    groups: Groups,
    chunks: Sequence[Any],
    optimizer: Optimizer,
    objective: Objective,
    batches: Iterable[Sequence[Microbatch]] | None,
    num_passes: int,
    num_samples: int,
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
        batches: This data-parallel rank's microbatches, one sequence of them for each pass through the schedule; None
            on ranks that do not read data.
        num_passes: Passes through the schedule, the same on all ranks.
        num_samples: Samples of the set.
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

    iterator = None if batches is None else iter(batches)
    _set_training(chunks, False)
    try:
        for _ in range(num_passes):
            own = None if iterator is None else next(iterator)
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
        samples=num_samples,
        seconds=time.perf_counter() - start,
    )


def _set_training(chunks: Sequence[torch.nn.Module], training: bool) -> None:
    for chunk in chunks:
        chunk.train(training)
