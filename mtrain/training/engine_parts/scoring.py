"""Scores of single tokens, collected by sample."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain.base.errors import ConfigError
from mtrain.data.datum import Datum
from mtrain.mcore.engine.rank_model import RankModel
from mtrain.training.engine_parts.batches import GlobalBatches
from mtrain.training.engine_parts.results import ForwardResult
from mtrain.training.forward import label_scores


def token_scores(batch: Sequence[Datum], entropy: bool, model: RankModel, batches: GlobalBatches) -> ForwardResult:
    """Returns log-probabilities of a global batch, and entropies if wanted. Collective over the world.

    Raises:
        DataError: A sample does not fit the configuration.
    """
    if model.config.model.num_labels is not None:
        raise ConfigError(
            f"model.num_labels={model.config.model.num_labels} is a head, which gives no log-probabilities of tokens; "
            "take Engine.scores (of one label) or Engine.evaluate"
        )
    samples = batches.samples(batch)
    plan = batches.plan(samples, len(batch))
    own = batches.own(plan, samples, has_first=True)
    found = label_scores(model, own, plan.num_microbatches, entropy).cpu()
    places = samples.places(plan, model.groups.layout.dp)
    of_samples = [
        found[:, row, begin : begin + len(datum.input_ids) - 1].clone()
        for (row, begin), datum in zip((places[slot] for slot in range(len(batch))), batch)
    ]
    return ForwardResult([each[0] for each in of_samples], [each[1] for each in of_samples] if entropy else [])
