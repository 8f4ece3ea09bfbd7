"""Log-probabilities and scores of a program's samples under the current weights, forward only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.api.batches import GlobalBatches, checked_batch
from mtrain.base.errors import ConfigError
from mtrain.config.extras import ROUTED_EXPERTS, TEMPERATURE
from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.config.schema.model import ModelSection
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.datum import Datum, check_temperature, named_choices
from mtrain.core.batch.order import slots
from mtrain.core.batch.zigzag import zigzag_index_on
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.engine.recorded_choices import RecordedChoices
from mtrain.core.engine.schedule import evaluating, run_forward
from mtrain.core.layers.output_layer import Logits
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.broadcast import broadcast_batches, slice_for_rank
from mtrain.core.step.loss import label_log_probs
from mtrain.core.step.results import ForwardResult
from mtrain.core.step.scoring_pass import sequence_scores


class AskedScores(NamedTuple):
    """What a pass over a global batch reports besides log-probabilities, and at which temperature."""

    entropy: bool = False
    temperature: float | None = None
    """Divisor of the logits; None: that of each sample, by default 1."""
    routed_experts: bool = False
    """Whether to report the tokens' experts; one all-reduce over the world per layer with experts."""


class LabelScores(NamedTuple):
    """Scores at each position of a global batch, the same on all ranks.

    Rows are ordered by microbatch, then by data-parallel rank: without packing by slot of the global batch.
    """

    scores: Tensor
    """[1 or 2, rows, seq] float32 on the device, in nats: log-probabilities of the labels, and entropies if
    requested."""
    routed_experts: Tensor | None
    """[rows, seq, layers, top_k] int32 on the CPU: experts of the tokens; None if not requested."""


@torch.no_grad()
def label_scores(
    model: RankModel,
    batches: Sequence[Microbatch] | None,
    num_microbatches: int,
    extras: Sequence[str],
    asked: AskedScores,
) -> LabelScores:
    """Returns the log-probability of the label at each position of a global batch, and the entropy if requested.

    One all-reduce of the result over the world at the end, in addition to megatron-core's own collectives. The model's
    parameters are gathered first, and it is left in training mode.

    Args:
        batches: Microbatches of this data-parallel rank, full rows; None on ranks that do not read data.
    """
    model.sharded.gather_parameters()
    config, groups = model.config, model.groups
    size, seq, layout = config.train.micro_batch_size, config.row_width, groups.layout
    shared = broadcast_batches(batches, num_microbatches, (MAIN_TERM,), config, groups, extras)
    rows = [replace(batch, mtp=()) for batch in slice_for_rank(shared, groups)]  # without MTP
    found = torch.zeros(1 + asked.entropy, num_microbatches * layout.dp * size, seq, device=groups.device)
    columns = torch.arange(seq)
    if layout.cp > 1:
        columns = zigzag_index_on(groups.device, seq, layout.cp, groups.cp_rank)
    numbers = itertools.count()
    temperature = 1.0 if asked.temperature is None else asked.temperature

    def take(logits: Logits, batch: Microbatch) -> None:
        scores = label_log_probs(logits, batch, config, groups, asked.entropy, temperature)
        own = slots(next(numbers), groups.dp_rank, layout.dp, size)
        if groups.counts_loss:  # otherwise every tensor-parallel rank would add the same numbers
            found[:, own.start : own.stop, columns] = scores

    experts = RecordedChoices(model, ROUTED_EXPERTS) if asked.routed_experts else None
    with evaluating(model.chunks), nullcontext() if experts is None else experts.recording():
        run_forward(model.chunks, rows, take, config)
    dist.all_reduce(found)
    if experts is None:
        return LabelScores(found, None)

    def write(table: Tensor, number: int, first: int, chosen: Tensor) -> None:
        own = slots(number, groups.dp_rank, layout.dp, size)
        table[own.start : own.stop, columns[first : first + len(chosen)]] = chosen.transpose(0, 1)

    return LabelScores(found, experts.gathered(found.shape[1], seq, size, write))


def check_adapters_off(adapter: AdapterSection | None, model: ModelSection) -> None:
    """Refuses passes of the frozen model without adapters, or with a head or table that is trained as a whole."""
    if adapter is None:
        raise ConfigError(
            "adapters_off needs a model with adapters, but the configuration has no adapter section; train one "
            "(docs/training/lora.md), or compute reference log-probabilities with forward before the first optim_step"
        )
    if model.output.is_new:
        raise ConfigError(
            f"adapters_off gives the model that a finetuning began from, but the head of {model.output} learns whole, "
            "so that it is gone; score with an engine before its first optim_step"
        )
    if adapter.modules_to_save:
        raise ConfigError(
            f"adapters_off gives the model that a finetuning began from, but adapter.modules_to_save="
            f"{', '.join(adapter.modules_to_save)} learns whole, so that the one of before is gone; score with an "
            "engine before its first optim_step"
        )


def reading(objective: Objective, batch: Sequence[Datum]) -> Objective:
    """Returns the objective of a global batch, which reads what its samples contain besides tokens and weights."""
    has_temperatures = any(datum.temperature is not None for datum in checked_batch(batch))
    return replace(objective, has_temperatures=has_temperatures, choices=named_choices(batch))


def scores_of_samples(batch: Sequence[Datum], model: RankModel, batches: GlobalBatches) -> list[float]:
    """Returns the score of each sample of a global batch for a preference loss. Collective over the world.

    Raises:
        DataError: A sample does not fit the configuration, or is member of no group.
    """
    extras = named_choices(checked_batch(batch))
    samples = batches.samples(batch, extras)
    plan = batches.plan(samples, len(batch))
    own = batches.own(plan, samples, has_first=True, extras=extras)
    return sequence_scores(model, own, plan.num_microbatches, extras).scores.tolist()


def token_scores(batch: Sequence[Datum], asked: AskedScores, model: RankModel, batches: GlobalBatches) -> ForwardResult:
    """Returns log-probabilities of a global batch, and what else is asked for. Collective over the world.

    Raises:
        ConfigError: The model has a head, or no experts to report.
        DataError: A sample does not fit the configuration.
    """
    if (head := model.config.model.head) is not None:
        raise ConfigError(
            f"{head} is a head, which gives no log-probabilities of tokens; take Engine.scores (of one label) or "
            "Engine.evaluate"
        )
    if asked.temperature is not None:
        check_temperature(asked.temperature, "temperature")
    elif all(datum.temperature is None for datum in checked_batch(batch)):
        asked = asked._replace(temperature=1.0)
    extras = (*([TEMPERATURE] if asked.temperature is None else []), *named_choices(batch))
    samples = batches.samples(batch, extras)
    plan = batches.plan(samples, len(batch))
    own = batches.own(plan, samples, has_first=True, extras=extras)
    scores, experts = label_scores(model, own, plan.num_microbatches, extras, asked)
    found = scores.cpu()
    places = samples.places(plan, model.groups.layout.dp)
    parts = [
        (row, slice(begin, begin + len(datum.input_ids) - 1))
        for (row, begin), datum in zip((places[slot] for slot in range(len(batch))), batch)
    ]
    of_samples = [found[:, row, part].clone() for row, part in parts]
    return ForwardResult(
        [each[0] for each in of_samples],
        [each[1] for each in of_samples] if asked.entropy else [],
        [] if experts is None else [experts[row, part].clone() for row, part in parts],
    )
