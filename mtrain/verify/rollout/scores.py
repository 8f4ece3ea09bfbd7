"""Log-probabilities of given tokens by the trainer, in its layout and precision, with the weights that gave them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mtrain.api.batches import AskedScores, GlobalBatches, token_scores
from mtrain.arch.features.feature import multiple_from
from mtrain.checkpoint.state.gather import parameter_shards
from mtrain.config.schema.loss import LossSection
from mtrain.core.batch.datum import Datum
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.results import ForwardResult
from mtrain.training.sampling.generate import Model, loaded_model
from mtrain.verify.core.weights import Arrays, gathered
from mtrain.verify.rollout.records import Rollout


class Scored(NamedTuple):
    """Result of a rank."""

    log_probs: list[list[float]]
    routes: list[list[list[list[int]]]] | None
    """The trainer's experts for each answer, as `Rollout.routes`; None if it has none to give."""
    weights: Arrays | None
    """Whole weights on rank 0; None elsewhere, or if not wanted."""


def scores(
    groups: Groups, model: Model, rollouts: Sequence[Rollout], with_weights: bool, replay: bool = False
) -> Scored:
    """Loads the model and computes the log-probabilities as a loss of the run would. Collective.

    `replay` sends tokens to the engine's experts instead of the trainer's.
    """
    loaded = loaded_model(model.entry, model.config, groups)
    batch = [
        Datum(
            [*each.prompt_ids, *each.ids], temperature=each.temperature, routed_experts=each.routes if replay else None
        )
        for each in rollouts
    ]
    experts = model.config.model.experts
    asked = AskedScores(routed_experts=experts is not None and experts.capacity_factor is None)
    found = token_scores(batch, asked, loaded, GlobalBatches(model.config, groups)) if batch else ForwardResult([], [])
    weights = gathered(parameter_shards(loaded.chunks, groups)) if with_weights else None
    return Scored(
        [tokens[-len(each.ids) :].tolist() for tokens, each in zip(found.log_probs, rollouts, strict=True)],
        [each.tolist() for each in found.routed_experts] or None,
        None if weights is None else weights.tensors,
    )


def for_scoring(model: Model, rollouts: Sequence[Rollout], max_ranks: int = 1) -> Model:
    """Returns the model with unpacked rows for the longest rollout, and a loss that needs nothing."""
    config = model.config
    length = multiple_from(max(each.num_read for each in rollouts), [2 * config.layout.cp * config.layout.tp])
    data = config.data.model_copy(update={"seq_length": length, "packing": None})
    # the number of rows of a step decides nothing here, but would refuse layouts that it does not divide over
    batch = config.train.micro_batch_size * math.lcm(*range(1, max_ranks + 1))
    train = config.train.model_copy(update={"tokens_per_micro_batch": None, "global_batch_size": batch})
    return model._replace(config=config.model_copy(update={"data": data, "train": train, "loss": LossSection()}))
