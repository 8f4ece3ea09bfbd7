"""Work of every rank in a test of balanced experts; the functions for `Pool.run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mtrain.base.errors import NumericError
from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import Built, build, own_microbatches

Parameters = Mapping[str, Any]
Rows = dict[str, list[float]]
"""One number per expert, by the global name of the router."""


def counts(groups: Groups, config: Config, parameters: Parameters, batch: GlobalBatch) -> Rows:
    """Counts the tokens of text that this rank sends to each expert in one step."""
    built = build(groups, config, parameters)
    built.training.forward_backward(own_microbatches(batch, groups, config))
    found = built.training.routers.counts
    assert found is not None
    return dict(zip(_names(built), found.tolist(), strict=True))


class Moment(NamedTuple):
    """State of the biases after a step."""

    biases: Rows
    overflowed: bool
    is_empty: bool


def biases_by_step(
    groups: Groups, config: Config, parameters: Parameters, batches: Sequence[GlobalBatch]
) -> list[Moment]:
    """Returns the biases of the choice after each step; a step that stops the run counts as one that overflowed."""
    built = build(groups, config, parameters)
    moments = []
    for batch in batches:
        try:
            totals = built.training.forward_backward(own_microbatches(batch, groups, config))
            update = built.training.update(totals, config.optimizer.lr)
        except NumericError:
            moments.append(Moment(_biases(built), True, False))
        else:
            moments.append(Moment(_biases(built), update is not None and update.overflowed, totals.is_empty))
    return moments


def _names(built: Built) -> list[str]:
    return [f"decoder.layers.{(router.layer_number or 0) - 1}.mlp.router" for router in built.training.routers.routers]


def _biases(built: Built) -> Rows:
    biases = [router.expert_bias for router in built.training.routers.routers]
    assert all(bias is not None and bias.dtype == torch.float32 for bias in biases)
    return {name: bias.tolist() for name, bias in zip(_names(built), biases, strict=True) if bias is not None}
