"""Forward passes without backward: the losses of some batches under the current weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mtrain.config import Config
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.loss_reduction import NO_TOKENS, GlobalTotals, PairAccumulator, StepSums, TermTotals
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.engine.schedule import evaluating, run_forward
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.broadcast import broadcast_batches, slice_for_rank
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.loss import OutputLoss
from mtrain.core.step.scoring_pass import PreferenceTotals, preference_pass
from mtrain.core.step.teacher import Teacher
from mtrain.core.step.totals import check_totals, planned_denominators


class ForwardTotals(NamedTuple):
    """Totals of forward passes, the same on all ranks."""

    terms: Mapping[str, TermTotals]
    diagnostics: Mapping[str, float]
    """Diagnostics by name, as in `StepTotals`."""


def forward_totals(
    model: RankModel,
    objective: Objective,
    passes: Iterable[Sequence[Microbatch] | None],
    teacher: Teacher | None = None,
) -> ForwardTotals:
    """Returns the totals of all terms over some batches, forward only; router terms exist only in training.

    Parameters are gathered first, and the model is left in training mode. One all-reduce of a short vector at the end.
    `passes` has the same length on all ranks; ranks that do not read data pass None for each.

    Raises:
        NumericError: A loss is not finite, or a denominator cannot be right.
    """
    # with overlap_param_gather the last update left its all-gather to the next forward pass
    model.sharded.gather_parameters()
    config, groups = model.config, model.groups
    terms = tuple(objective.functions)
    count = num_microbatches(config, groups)
    # one accumulator over all passes: sum over sum, not a mean of means
    sums = StepSums(PairAccumulator(terms, groups.device), dict.fromkeys(terms, 0.0))
    sums.pairs.diagnostics.expect(objective.reported)

    def accumulate(rows: Sequence[Microbatch], loss: OutputLoss) -> None:
        run_forward(model.chunks, rows, lambda *output: sums.pairs.add(loss.pairs(*output)), config)

    preference = PreferenceTotals()
    with evaluating(model.chunks):
        for batches in passes:
            if objective.preference is not None:
                scored = preference_pass(model, objective, batches, count)
                batches, preference = scored.batches, preference.plus(scored.totals)
            # planned denominators are for the check below, which also finds a validation row that is counted twice
            sums.add_batches(planned_denominators(batches or [], terms), NO_TOKENS)
            if objective.preference is not None and len(terms) == 1:
                continue  # the scoring pass computed the only term
            shared = broadcast_batches(batches, count, terms, config, groups, objective.extras)
            rows = slice_for_rank(shared, groups)
            accumulate(rows, OutputLoss(batches, rows, model, objective, teacher))
    global_totals = GlobalTotals(sums, groups).read(objective.coefficients)
    totals = global_totals.terms
    if objective.preference is not None:
        # the main term comes from the scoring pass alone
        main = replace(totals[MAIN_TERM], numerator=preference.numerator, denominator=preference.denominator)
        totals = {**totals, MAIN_TERM: main}
    check_totals(totals, compare_with_plan=config.loss.denominator == "planned")
    return ForwardTotals(totals, {**global_totals.diagnostics, **preference.means})


def num_microbatches(config: Config, groups: Groups) -> int | None:
    """Returns the number of microbatches per data-parallel rank and step; None with packing, where it varies."""
    if config.data.packing is not None:
        return None
    return groups.layout.num_microbatches(config.sequences_per_step, config.train.micro_batch_size)
