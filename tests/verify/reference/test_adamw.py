"""Exact AdamW against torch, and the bound on float32's rounding."""

import numpy as np
import pytest
import torch

from mtrain.config.schema.train import AdamWSection
from mtrain.verify.core.tolerances import update_tolerance
from mtrain.verify.reference.optimizer import AdamW

SHAPES = {"matrix": (5, 7), "bias": (7,)}
LR = 3e-3


def section(**changes: float | bool) -> AdamWSection:
    return AdamWSection(lr=LR, **changes)


def drawn(seed: int, scale: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, scale, shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steps_are_those_of_torch_within_the_tolerance(dtype: torch.dtype, scale: float) -> None:
    options = section(clip_grad=0.0)
    ours, weights = AdamW(options), drawn(0, 0.1)
    tensors = {name: torch.tensor(value, dtype=dtype, requires_grad=True) for name, value in weights.items()}
    groups = [
        {"params": [tensors["matrix"]], "weight_decay": options.weight_decay},
        {"params": [tensors["bias"]], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=LR, betas=(options.beta1, options.beta2), eps=options.epsilon)
    tolerance = 0.0
    for step in range(1, 6):
        gradients = drawn(step, scale)
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(gradients[name], dtype=dtype)
        theirs.step()
        before = weights
        exact = ours.updated(before, gradients, 1.0, LR)
        weights = {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}
        tolerance = update_tolerance(step) if dtype == torch.float32 else 1e-13
        for name in SHAPES:
            assert (np.abs(weights[name] - exact.weights[name]) <= tolerance * exact.scales[name]).all()
    assert tolerance < 4e-6


def test_parts_of_a_tower_have_rates_of_their_own() -> None:
    """A schedule has halved the rate of the language model, and so all."""
    options = section(clip_grad=0.0, tower_lr=7e-3, projector_lr=2e-4)
    rates = {"decoder.weight": LR, "vision.blocks.0.weight": 7e-3, "vision.merger.weight": 2e-4}
    rates |= {"vision.deepstack_merger_list.0.weight": 2e-4}
    drawn_numbers = np.random.default_rng(4).normal(size=(2, len(rates), 5, 7))
    weights, gradients = (dict(zip(rates, values, strict=True)) for values in drawn_numbers)
    new = AdamW(options).updated(weights, gradients, 1.0, LR / 2).weights
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in weights.items()}
    groups = [{"params": [tensor], "lr": rates[name] / 2} for name, tensor in tensors.items()]
    theirs = torch.optim.AdamW(
        groups, betas=(options.beta1, options.beta2), eps=options.epsilon, weight_decay=options.weight_decay
    )
    for name, tensor in tensors.items():
        tensor.grad = torch.tensor(gradients[name])
    theirs.step()
    for name, tensor in tensors.items():
        np.testing.assert_allclose(new[name], tensor.detach().numpy(), rtol=1e-13)


def test_gradients_are_clipped_by_the_norm_that_is_given() -> None:
    gradients, weights = drawn(1, 1.0), drawn(2, 0.1)
    clipped = AdamW(section(clip_grad=0.5, epsilon=0.1)).updated(weights, gradients, 2.0, LR)
    factor = 0.5 / (2.0 + 1e-6)
    scaled = {name: value.astype(np.float64) * factor for name, value in gradients.items()}
    by_hand = AdamW(section(clip_grad=0.0, epsilon=0.1)).updated(weights, scaled, 2.0, LR)
    for name in SHAPES:
        np.testing.assert_allclose(clipped.weights[name], by_hand.weights[name], rtol=1e-12)
    unclipped = AdamW(section(clip_grad=5.0, epsilon=0.1)).updated(weights, gradients, 2.0, LR)
    assert not np.allclose(unclipped.weights["matrix"], clipped.weights["matrix"], rtol=1e-6)


@pytest.mark.parametrize("decay", [True, False])
def test_norms_and_biases_decay_where_they_are_asked_to(decay: bool) -> None:
    nothing = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    weights = drawn(3, 1.0)
    new = AdamW(section(weight_decay=0.5, decay_norms_and_biases=decay)).updated(weights, nothing, 0.0, LR).weights
    np.testing.assert_allclose(new["matrix"], weights["matrix"].astype(np.float64) * (1 - LR * 0.5))
    np.testing.assert_allclose(new["bias"], weights["bias"].astype(np.float64) * (1 - LR * 0.5 * decay))
