"""Reward models and classification against transformers and TRL in float64, under layouts that separate pairs."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from mtrain.config import Config
from tests.parity.cases import Case, case
from tests.parity.compare import TOLERANCE, relative, worst
from tests.parity.objectives.heads import (
    CENTER,
    NUM_GROUPS,
    adapted,
    by_global_name,
    classification_loss,
    data,
    learned,
    model_of,
    pooled,
    regression_loss,
    reward_loss,
    scattered,
    with_numbers,
)
from tests.parity.ranks import Arrays, Run, train_each
from tests.pool import Pool

PACKED = {"data__isolate_documents": True, "data__packing": {}}
LAYOUTS = [
    pytest.param(case(3, num_layers=2, pp=2), {}, id="pp2"),
    pytest.param(case(1, num_layers=2, cp=2, dp=2), PACKED, id="cp2 dp2 packed"),
    # the day has a head over tensor ranks with adapters; its stages are the model's
    pytest.param(case(3, num_layers=4, pp=2, vpp=2), {}, id="pp2 vpp2", marks=pytest.mark.nightly),
    pytest.param(case(3, num_layers=2), {}, id="one process", marks=pytest.mark.nightly),
    pytest.param(case(2, num_layers=2, dp=2), {}, id="dp2", marks=pytest.mark.nightly),
    pytest.param(case(4, num_layers=2, tp=2, sp=True), {}, id="tp2 sp", marks=pytest.mark.nightly),
    pytest.param(case(6, num_layers=2, cp=2), {}, id="cp2", marks=pytest.mark.nightly),
    pytest.param(case(2, num_layers=2, tp=2, pp=2), PACKED, id="tp2 pp2 packed", marks=pytest.mark.nightly),
]
KINDS = {
    "reward_model": (1, NUM_GROUPS, {"center_rewards_coefficient": CENTER}),
    "classification": (3, 2 * NUM_GROUPS, {}),
}
SIZES = {"regression": (1, 2 * NUM_GROUPS, {}), **KINDS}
"""Loss -> labels of the head, samples of a step, options."""


class Exact(NamedTuple):
    """Results of transformers and TRL for a step."""

    parameters: Arrays
    loss: float
    gradients: Arrays
    diagnostics: dict[str, float]


def config_of(kind: str, one: Case, changes: dict[str, Any]) -> Config:
    labels, size, options = SIZES[kind]
    return one.config(
        model__num_labels=labels,
        train__global_batch_size=size,
        loss__function=kind,
        loss__options=options,
        **changes,
    )


@cache
def exact(kind: str, layers: int) -> Exact:
    """Computes the exact results for a loss and a number of layers."""
    labels, _, _ = KINDS[kind]
    config = config_of(kind, case(num_layers=layers), {})
    model, batch = model_of(config), data(labels)
    loss = reward_loss(batch, model) if labels == 1 else classification_loss(batch, model)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    named = dict(zip(dict(model.named_parameters()), gradients, strict=True))
    logits, weights = pooled(batch, model), torch.tensor([datum.weight for datum in batch])
    if labels == 1:
        wins = (logits[::2, 0] > logits[1::2, 0]).double()
        gap = logits[::2, 0] - logits[1::2, 0]
        of_pairs = weights[::2].double() / weights[::2].sum()
        seen = {"reward_accuracy": float(wins @ of_pairs), "reward_margin": float(gap @ of_pairs)}
    else:
        classes = torch.tensor([datum.label for datum in batch])
        seen = {"accuracy": float((logits.argmax(-1) == classes).double().mean())}
    assert 0 < seen[next(iter(seen))] < 1, "some right, some wrong"
    parameters = by_global_name({name: each.detach() for name, each in model.named_parameters()}, config)
    return Exact(parameters, loss.item(), by_global_name(named, config), seen)


@pytest.mark.parametrize(("one", "changes"), LAYOUTS)
def test_losses_and_gradients_are_those_of_transformers_and_trl(pool: Pool, one: Case, changes: dict[str, Any]) -> None:
    configs = {kind: config_of(kind, one, changes) for kind in KINDS}
    wanted = {kind: exact(kind, one.num_layers) for kind in KINDS}
    runs = [
        Run(config, wanted[kind].parameters, [scattered(data(KINDS[kind][0]), config)])
        for kind, config in configs.items()
    ]
    ranks = pool.run(train_each, one.resolved(configs["reward_model"]), runs)
    for number, (kind, expected) in enumerate(wanted.items()):
        for rank in ranks:
            step = rank[number].steps[0]
            assert relative(step.loss, expected.loss) < 1e-6, kind
            assert {name: step.diagnostics[name] for name in expected.diagnostics} == pytest.approx(
                expected.diagnostics, rel=1e-5
            ), kind
        assert worst(ranks[0][number].steps[0].gradients, expected.gradients, configs[kind]) < 2e-6, kind


@pytest.mark.parametrize(
    ("one", "changes"),
    [
        pytest.param(case(3, num_layers=2, tp=2, sp=True), {}, id="tp2 sp"),
        # the day has adapters on these in tests/verify/parity, and heads above
        pytest.param(case(2, num_layers=2, dp=2), {}, id="dp2", marks=pytest.mark.nightly),
        pytest.param(case(1, num_layers=2, pp=2), PACKED, id="pp2 packed", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.nightly  # tests/core/adapters/test_peft.py has both by day
def test_a_head_learns_whole_with_adapters_as_in_peft(pool: Pool, one: Case, changes: dict[str, Any]) -> None:
    """Checks gradients of every pair and of the head, and that nothing else has one."""
    config = config_of("reward_model", one, {**changes, "adapter": {"rank": 3, "alpha": 5.0}})
    model, parameters = adapted(model_of(config), config)
    loss = reward_loss(batch := data(1), model)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()))
    expected = learned(dict(zip(trained, gradients, strict=True)), config)
    run = Run(config, {name: each.numpy() for name, each in parameters.items()}, [scattered(batch, config)])
    ranks = pool.run(train_each, one.resolved(config), [run])
    for rank in ranks:
        assert relative(rank[0].steps[0].loss, loss.item()) < 1e-6
    found = ranks[0][0].steps[0].gradients
    assert found.keys() == expected.keys()
    assert worst(found, {name: each.numpy() for name, each in expected.items()}, config) < TOLERANCE
    after = ranks[0][0].parameters
    rows = {name: torch.from_numpy(after[name])[: len(each)] for name, each in parameters.items()}  # without padding
    changed = {name for name, each in parameters.items() if not torch.equal(rows[name], each.float())}
    assert changed == expected.keys()


@pytest.mark.parametrize(
    ("one", "changes"),
    [
        pytest.param(case(2, num_layers=2, dp=2), {}, id="dp2"),
        # the head is the reward model's, which the day has on these axes
        pytest.param(case(3, num_layers=2, pp=2), {}, id="pp2", marks=pytest.mark.nightly),
        pytest.param(
            case(1, num_layers=2, cp=2, tp=2, sp=True), PACKED, id="cp2 tp2 packed", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_regression_is_that_of_transformers(pool: Pool, one: Case, changes: dict[str, Any]) -> None:
    config = config_of("regression", one, changes)
    model, batch = model_of(config), with_numbers(data(1))
    loss = regression_loss(batch, model)
    gradients = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, [*model.parameters()]), strict=True))
    parameters = by_global_name({name: each.detach() for name, each in model.named_parameters()}, config)
    numbers = torch.tensor([datum.label for datum in batch], dtype=torch.float64)
    errors = (pooled(batch, model)[:, 0] - numbers).abs()
    ranks = pool.run(train_each, one.resolved(config), [Run(config, parameters, [scattered(batch, config)])])
    for rank in ranks:
        step = rank[0].steps[0]
        assert relative(step.loss, loss.item()) < 1e-6
        assert step.diagnostics == pytest.approx({"absolute_error": errors.mean().item()}, rel=1e-6)
    assert worst(ranks[0][0].steps[0].gradients, by_global_name(gradients, config), config) < 2e-6
