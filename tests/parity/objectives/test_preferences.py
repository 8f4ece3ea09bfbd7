"""Preference losses against TRL's own code in float64, under layouts that separate the answers of a pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtrain.config import Config
from mtrain.config.schema.loss import PREFERENCE_LOSSES
from tests.parity.cases import Case, case
from tests.parity.compare import initial_parameters, relative, worst
from tests.parity.objectives.preferences import (
    NUM_GROUPS,
    OPTIONS,
    model_of,
    naive_loss,
    scattered,
    sequences,
    trl_loss,
    with_references,
)
from tests.parity.ranks import Arrays, Run, train_each
from tests.pool import Pool
from tests.trl_losses import Trl

PACKED = {"data__isolate_documents": True, "data__packing": {}}
LAYOUTS = [
    pytest.param(case(6, num_layers=2, pp=2), {}, [*OPTIONS], id="pp2"),
    # every formula is above; here are pairs that are apart, and a mean over all of them
    pytest.param(case(1, num_layers=2, cp=2, dp=2), PACKED, ["dpo", "kto"], id="cp2 dp2 packed"),
    pytest.param(case(6, num_layers=2, tp=2, sp=True), {}, ["simpo"], id="tp2, one formula"),
    *(  # the day has each formula, and each axis
        pytest.param(each, changes, [*OPTIONS], id=name, marks=pytest.mark.nightly)
        for name, each, changes in (
            ("one process", case(3, num_layers=2), {}),
            ("dp2", case(2, num_layers=2, dp=2), {}),
            ("tp2", case(4, num_layers=2, tp=2, sp=True), {}),
            ("cp2", case(6, num_layers=2, cp=2), {}),
            ("cp2 dp2 packed, all", case(1, num_layers=2, cp=2, dp=2), PACKED),
            ("tp2 pp2 packed", case(2, num_layers=2, tp=2, pp=2), PACKED),
        )
    ),
]


def config_of(kind: str, one: Case, changes: dict[str, Any]) -> Config:
    return one.config(train__global_batch_size=NUM_GROUPS, loss__function=kind, loss__options=OPTIONS[kind], **changes)


@pytest.fixture(scope="module")
def exact() -> dict[str, tuple[Run, float, Arrays]]:
    """Computes for each loss: what is trained, TRL's loss and its gradient by every parameter."""
    found = {}
    for kind in OPTIONS:
        config = config_of(kind, case(num_layers=2), {})
        parameters = initial_parameters(config)
        model, leaves = model_of(parameters, config)
        reference, _ = model_of(initial_parameters(config, seed=4), config)
        with torch.no_grad():
            batch = with_references(sequences(kind), reference, PREFERENCE_LOSSES[kind].aggregation.endswith("-mean"))
        trl = Trl(model, reference)
        loss = trl_loss(kind, batch, trl)
        gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        with torch.no_grad():
            naive = naive_loss(kind, batch, trl).item()
        assert relative(naive, loss.item()) > 1e-3, "means of microbatches are another loss"
        run = Run(config, parameters, [scattered(batch)])
        found[kind] = (run, loss.item(), {name: value.numpy() for name, value in gradients.items()})
    return found


@pytest.mark.parametrize(("one", "changes", "kinds"), LAYOUTS)
def test_losses_and_gradients_are_those_of_trl(
    pool: Pool, exact: dict[str, tuple[Run, float, Arrays]], one: Case, changes: dict[str, Any], kinds: list[str]
) -> None:
    configs = {kind: config_of(kind, one, changes) for kind in kinds}
    layout = one.resolved(configs[kinds[0]])
    runs = [exact[kind][0]._replace(config=config) for kind, config in configs.items()]
    ranks = pool.run(train_each, layout, runs)
    for number, kind in enumerate(kinds):
        _, loss, gradients = exact[kind]
        for rank in ranks:
            assert relative(rank[number].steps[0].loss, loss) < 1e-6, kind
        found = ranks[0][number].steps[0].gradients
        assert found is not None
        assert worst(found, gradients, configs[kind]) < 2e-6, kind
