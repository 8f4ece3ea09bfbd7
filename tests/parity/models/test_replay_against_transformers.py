"""Routing replay in transformers, whose top-k is replaced, with the same weights: loss and every gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtrain.config.schema.model import ModelSection
from tests.parity import ranks
from tests.parity.batches import GlobalBatch, three_steps
from tests.parity.cases import Case, case, lean
from tests.parity.compare import Deviation, at_night, relative, worst
from tests.parity.models import test_against_transformers as plain
from tests.parity.models.test_experts_against_transformers import mixtral, qwen3_moe
from tests.parity.models.test_groups_against_transformers import deepseek
from tests.parity.replay import with_routes
from tests.pool import Pool

FAMILIES = {"mixtral": mixtral, "qwen3_moe": qwen3_moe, "deepseek_v3": lambda: deepseek(3, 2)}
RUNS = [
    ("qwen3_moe", case(4)),
    at_night("deepseek_v3", case(8, tp=2, sp=True, ep=2, pp=2)),  # the first oracle has layouts: test_routing_replay.py
    at_night("mixtral", lean(case(4, cp=2, ep=2), 4)),
    at_night("mixtral", case(4)),
    at_night("deepseek_v3", case(8)),
    at_night("qwen3_moe", lean(case(4, tp=2, sp=True, dp=2, ep=2, etp=2), 4)),
]


@pytest.mark.parametrize(("family", "case"), RUNS)
def test_the_replay_is_that_of_transformers(pool: Pool, family: str, case: Case) -> None:
    model = case.config(**FAMILIES[family]()[0]).model
    batch = with_routes(three_steps()[0], model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", _ReplacedChoice(batch, model))
        reference = plain.computed(FAMILIES[family])
    config = case.config(**reference.knobs)
    outcome = pool.run(ranks.train, case.resolved(config), config, reference.state, [batch])[0]
    (step,) = outcome.steps
    norm = float(np.sqrt(sum((value**2).sum() for value in reference.gradients.values())))
    Deviation(
        relative(step.loss, reference.loss),
        relative(step.grad_norm, norm),
        worst(step.gradients, reference.gradients, config),
        weights=0.0,
    ).assert_below()


class _ReplacedChoice:
    """torch.topk that takes the experts of samples where it is to choose among experts, once in each layer."""

    def __init__(self, batch: GlobalBatch, model: ModelSection) -> None:
        assert model.experts is not None
        self._chosen_by_torch, self._num_experts = torch.topk, model.experts.num_experts
        nothing = np.full((len(batch[0].tokens), model.num_layers, model.experts.top_k), -1)
        given = np.stack([each.choices.get("routed_experts", nothing) for each in batch])
        layers = [layer for layer in range(model.num_layers) if model.has_experts(layer)]
        self._given = iter([torch.from_numpy(given[:, :, layer]).flatten(0, 1).long() for layer in layers])

    def __call__(self, values: Tensor, k: int, **options: Any) -> tuple[Tensor, Tensor]:
        found, places = self._chosen_by_torch(values, k, **options)
        if values.shape[-1] != self._num_experts:  # groups
            return found, places
        given = next(self._given)
        places = torch.where(given >= 0, given, places)
        return values.gather(-1, places), places
