"""Forward passes without a backward: losses and log-probabilities of some batches under the current weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.extras import TEMPERATURE
from mtrain.data.batch import Microbatch
from mtrain.data.datum import Datum, check_temperature
from mtrain.data.order import slots
from mtrain.data.zigzag import zigzag_index_on
from mtrain.loss.objective import Objective
from mtrain.loss.pair import MAIN_TERM
from mtrain.mcore.distributed.broadcast import broadcast_batches, slice_for_rank
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine.loss_reduction import NO_TOKENS, GlobalTotals, PairAccumulator, StepSums, TermTotals
from mtrain.mcore.engine.rank_model import RankModel
from mtrain.mcore.engine.schedule import evaluating, run_forward
from mtrain.mcore.model.output_layer import Logits
from mtrain.mcore.state.teacher import Teacher
from mtrain.training.batches import GlobalBatches
from mtrain.training.output.loss import OutputLoss, label_log_probs
from mtrain.training.preferences.scoring_pass import PreferenceTotals, preference_pass
from mtrain.training.results import ForwardResult
from mtrain.training.totals import check_totals, planned_denominators


class ForwardTotals(NamedTuple):
    """Totals of a forward pass over some batches, the same on all ranks."""

    terms: Mapping[str, TermTotals]
    diagnostics: Mapping[str, float]
    """Diagnostics of the loss functions, as in `StepTotals`."""


def forward_totals(
    model: RankModel,
    objective: Objective,
    passes: Iterable[Sequence[Microbatch] | None],
    teacher: Teacher | None = None,
) -> ForwardTotals:
    """Returns the totals of every term of logits over some batches, forward only; router terms belong to training.

    One all-reduce of a short vector at the end, in addition to megatron-core's own collectives.

    Args:
        model: Model of this rank; its parameters are gathered first, and it is left in training mode.
        objective: Objective that defines the terms.
        passes: Microbatches that this rank reads for each pass through the schedule, as many passes on all ranks; None
            on ranks that do not read data.
        teacher: Teacher; needed if a term compares with one.

    Raises:
        NumericError: A loss is not finite, or a denominator cannot be right.
    """
    # with overlap_param_gather the all-gather of the last update is left to the next forward pass
    model.optimizer.gather_parameters()
    config, groups = model.config, model.groups
    terms = tuple(objective.functions)
    count = num_microbatches(config, groups)
    # one accumulator over all passes: sum over sum, not a mean of means
    sums = StepSums(PairAccumulator(terms, groups.device), dict.fromkeys(terms, 0.0))
    sums.pairs.diagnostics.expect(objective.reported)

    def accumulate(rows: Sequence[Microbatch], loss: OutputLoss) -> None:
        run_forward(model.chunks, rows, lambda *output: sums.pairs.add(loss.pairs(*output)), config)

    compared = PreferenceTotals()
    with evaluating(model.chunks):
        for own in passes:
            if objective.preference is not None:
                found = preference_pass(model, objective.preference, own, count)
                own, compared = found.batches, compared.plus(found.totals)
            # planned denominators are compared in validation too: it reveals a row that is counted twice
            sums.add_batches(planned_denominators(own or [], terms), NO_TOKENS)
            if objective.preference is not None and len(terms) == 1:
                continue  # the scoring pass has computed everything
            shared = broadcast_batches(own, count, terms, config, groups, objective.extras)
            rows = slice_for_rank(shared, groups)
            accumulate(rows, OutputLoss(own, rows, model, objective, teacher))
    read = GlobalTotals(sums, groups).read(objective.coefficients)
    totals = read.terms
    if objective.preference is not None:
        totals = compared.joined_to(totals)
    check_totals(totals, compare_with_plan=config.loss.denominator == "planned")
    return ForwardTotals(totals, {**read.diagnostics, **compared.means})


def num_microbatches(config: Config, groups: Groups) -> int | None:
    """Returns the microbatches per data-parallel rank and step; None if rows are packed, where the number varies."""
    if config.data.packing is not None:
        return None
    return groups.layout.num_microbatches(config.sequences_per_step, config.train.micro_batch_size)


@torch.no_grad()
def label_scores(
    model: RankModel,
    batches: Sequence[Microbatch] | None,
    num_microbatches: int,
    with_entropy: bool,
    temperature: float | None = 1.0,
) -> Tensor:
    """Returns the log-probability of the label at each position of a global batch, and the entropy if wanted.

    The pass is forward only. One all-reduce of the result over the world at the end, in addition to megatron-core's own
    collectives.

    Args:
        model: Model of this rank; its parameters are gathered first, and it is left in training mode.
        batches: Microbatches of this data-parallel rank, full rows; None on ranks that do not read data.
        num_microbatches: Number of these microbatches.
        with_entropy: Whether the entropy is wanted.
        temperature: Divisor of the logits; None if the batches have that of each sample as an extra.

    Returns:
        Log-probabilities, and entropies if wanted, in nats, [1 or 2, rows, seq] float32 on the device, the same on all
        ranks. Rows are ordered by microbatch, then by data-parallel rank: without packing by slot of the global batch.
    """
    model.optimizer.gather_parameters()
    config, groups = model.config, model.groups
    size, seq, layout = config.train.micro_batch_size, config.row_width, groups.layout
    extras = (TEMPERATURE,) if temperature is None else ()
    shared = broadcast_batches(batches, num_microbatches, (MAIN_TERM,), config, groups, extras)
    rows = [replace(batch, mtp=()) for batch in slice_for_rank(shared, groups)]  # without the tokens further ahead
    found = torch.zeros(1 + with_entropy, num_microbatches * layout.dp * size, seq, device=groups.device)
    columns = torch.arange(seq)
    if layout.cp > 1:
        columns = zigzag_index_on(groups.device, seq, layout.cp, groups.cp_rank)
    numbers = itertools.count()

    def take(logits: Logits, batch: Microbatch) -> None:
        scores = label_log_probs(logits, batch, config, groups, with_entropy, temperature or 1.0)
        own = slots(next(numbers), groups.dp_rank, layout.dp, size)
        if groups.counts_loss:  # otherwise every tensor-parallel rank would add the same numbers
            found[:, own.start : own.stop, columns] = scores

    with evaluating(model.chunks):
        run_forward(model.chunks, rows, take, config)
    dist.all_reduce(found)
    return found


def token_scores(
    batch: Sequence[Datum], entropy: bool, temperature: float | None, model: RankModel, batches: GlobalBatches
) -> ForwardResult:
    """Returns log-probabilities of a global batch, and entropies if wanted. Collective over the world.

    Args:
        batch: Samples of the global batch.
        entropy: Whether the entropy is wanted.
        temperature: Divisor of the logits; None: that of each sample, 1 where it has none.
        model: Model of this rank.
        batches: Splits samples over ranks.

    Raises:
        DataError: A sample does not fit the configuration.
    """
    if model.config.model.num_labels is not None:
        raise ConfigError(
            f"model.num_labels={model.config.model.num_labels} is a head, which gives no log-probabilities of tokens; "
            "take Engine.scores (of one label) or Engine.evaluate"
        )
    if temperature is not None:
        check_temperature(temperature, "temperature")
    elif all(datum.temperature is None for datum in batch):
        temperature = 1.0
    extras = (TEMPERATURE,) if temperature is None else ()
    samples = batches.samples(batch, extras)
    plan = batches.plan(samples, len(batch))
    own = batches.own(plan, samples, has_first=True, extras=extras)
    found = label_scores(model, own, plan.num_microbatches, entropy, temperature).cpu()
    places = samples.places(plan, model.groups.layout.dp)
    of_samples = [
        found[:, row, begin : begin + len(datum.input_ids) - 1].clone()
        for (row, begin), datum in zip((places[slot] for slot in range(len(batch))), batch)
    ]
    return ForwardResult([each[0] for each in of_samples], [each[1] for each in of_samples] if entropy else [])
