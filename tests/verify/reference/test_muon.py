"""Exact Muon against torch's, against singular values, and the bound on float32's rounding."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import AdamWSection, MuonSection
from mtrain.verify.core.tolerances import update_tolerance
from mtrain.verify.reference.optimizer import AdamW, ExactMuon, Moments, matrices

LR = 3e-3
NAME = "decoder.layers.0.self_attention.linear_proj.weight"
MODEL = ModelSection(num_layers=1, hidden_size=12, ffn_hidden_size=20, num_attention_heads=3, vocab_size=30)


def section(**changes: Any) -> MuonSection:
    return MuonSection(kind="muon", **({"lr": LR, "clip_grad": 0.0} | changes))


def drawn(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def by_singular_values(gradient: np.ndarray, num_steps: int) -> np.ndarray:
    """Applies the polynomial to each singular value, number by number."""
    left, values, right = np.linalg.svd(gradient.astype(np.float64), full_matrices=False)
    values = values / np.sqrt((values**2).sum())
    for _ in range(num_steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    product: np.ndarray = left @ np.diag(values) @ right
    return product


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 4), (4, 1)])
@pytest.mark.parametrize("num_steps", [1, 5])
@pytest.mark.parametrize("scale", [1.0, 1e-25])
def test_a_first_update_brings_singular_values_near_one(shape: tuple[int, int], num_steps: int, scale: float) -> None:
    """The gradient may have any size, with momentum or without."""
    weights, gradient = drawn(0, shape), drawn(1, shape, scale)
    for nesterov in (True, False):
        options = section(newton_schulz_steps=num_steps, weight_decay=0.1, update_rms=0.3, nesterov=nesterov)
        new = ExactMuon(options, MODEL).updated({NAME: weights}, {NAME: gradient}, 1.0, LR).weights[NAME]
        step = 0.3 * np.sqrt(max(shape)) * by_singular_values(gradient, num_steps)
        np.testing.assert_allclose(
            new, weights - LR * (step + 0.1 * weights.astype(np.float64)), rtol=1e-10, atol=1e-13
        )


def test_steps_are_those_of_torch_in_its_half_precision() -> None:
    """torch orthogonalizes in bfloat16, and is close where no singular value is small."""
    weights = drawn(0, (6, 10), 0.1)
    tensor = torch.nn.Parameter(torch.from_numpy(weights.copy()).double())
    theirs = torch.optim.Muon([tensor], LR, 0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    ours, start = ExactMuon(section(weight_decay=0.1), MODEL), weights.astype(np.float64)
    largest = 0.0
    for step in range(4):
        gradient = np.eye(6, 10, dtype=np.float32) + drawn(step + 1, (6, 10), 0.2)
        tensor.grad = torch.from_numpy(gradient).double()
        before = tensor.detach().numpy().copy()
        theirs.step()
        new = ours.updated({NAME: before}, {NAME: gradient}, 1.0, LR).weights[NAME]
        moved = np.abs(new - before).max()
        largest = max(largest, float(np.abs(tensor.detach().numpy() - new).max() / moved))
    assert largest < 0.05
    assert np.abs(tensor.detach().numpy() - start).max() > 3 * LR * 0.1


def test_nothing_to_learn_decays_only() -> None:
    weights = drawn(0, (4, 6))
    found = ExactMuon(section(weight_decay=0.5), MODEL).updated({NAME: weights}, {NAME: np.zeros((4, 6))}, 0.0, LR)
    np.testing.assert_array_equal(found.weights[NAME], weights - LR * (0.5 * weights.astype(np.float64)))


def test_gradients_are_clipped_before_they_are_remembered() -> None:
    """One gradient alone would not show it, as the direction does not depend on the size."""
    weights, gradients = drawn(0, (4, 6)), [drawn(1, (4, 6), 5.0), drawn(2, (4, 6), 0.1)]
    norms = [float(np.linalg.norm(gradient)) for gradient in gradients]

    def after(clip_grad: float, given: list[np.ndarray]) -> np.ndarray:
        optimizer, found = ExactMuon(section(clip_grad=clip_grad), MODEL), weights.astype(np.float64)
        for gradient, norm in zip(given, norms):
            found = optimizer.updated({NAME: found}, {NAME: gradient}, norm, LR).weights[NAME]
        return found

    by_hand = [gradient * np.float64(min(1.0, 1 / (norm + 1e-6))) for gradient, norm in zip(gradients, norms)]
    np.testing.assert_allclose(after(1.0, gradients), after(0.0, by_hand), rtol=1e-12)
    assert np.abs(after(1.0, gradients) - after(0.0, gradients)).max() > 0.1 * LR


def test_tables_routers_norms_and_biases_are_adamws() -> None:
    shapes = {
        "embedding.word_embeddings.weight": (30, 12),
        "output_layer.weight": (30, 12),
        "decoder.layers.0.mlp.router.weight": (4, 12),
        "decoder.layers.0.input_layernorm.weight": (12,),
        "decoder.layers.0.mlp.linear_fc2.bias": (12,),
    }
    weights = {name: drawn(seed, shape) for seed, (name, shape) in enumerate(shapes.items())}
    first = {name: drawn(seed + 10, shape, 0.1) for seed, (name, shape) in enumerate(shapes.items())}
    second = {name: np.square(value) for name, value in first.items()}
    gradients = {name: drawn(seed + 20, shape) for seed, (name, shape) in enumerate(shapes.items())}
    start = Moments(3, first, second)
    found = ExactMuon(section(), MODEL, start).updated(weights, gradients, 1.0, LR)
    expected = AdamW(AdamWSection(lr=LR, clip_grad=0.0), start).updated(weights, gradients, 1.0, LR)
    assert found.weights.keys() == shapes.keys()
    for name in shapes:
        np.testing.assert_array_equal(found.weights[name], expected.weights[name])
        np.testing.assert_array_equal(found.scales[name], expected.scales[name])


def test_state_goes_on() -> None:
    gradients = [drawn(seed, (5, 7)) for seed in range(3)]
    straight, weights = ExactMuon(section(momentum=0.8), MODEL), drawn(9, (5, 7)).astype(np.float64)
    for gradient in gradients:
        last = straight.updated({NAME: weights}, {NAME: gradient}, 1.0, LR)
    mean = 0.2 * gradients[1] + 0.8 * 0.2 * gradients[0]
    resumed = ExactMuon(section(momentum=0.8), MODEL, Moments(2, {NAME: mean}, {}))
    found = resumed.updated({NAME: weights}, {NAME: gradients[2]}, 1.0, LR).weights[NAME]
    np.testing.assert_allclose(found, last.weights[NAME], rtol=1e-6)


LATENTS = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
LATENT = ModelSection.model_validate(MODEL.model_dump() | {"mla": LATENTS})
GROUPED = ModelSection.model_validate(MODEL.model_dump() | {"num_attention_heads": 6, "num_query_groups": 3})


@pytest.mark.parametrize(
    ("model", "module", "num_rows", "sizes", "first_rows"),
    [
        (GROUPED, "self_attention.linear_qkv", 24, [12, 6, 6], [0, 4, 6]),
        (MODEL, "mlp.linear_fc1", 40, [20, 20], [0, 20]),
        (MODEL, "mlp.experts.3.linear_fc1", 40, [20, 20], [0, 20]),
        (MODEL, "mlp.linear_fc2", 12, [12], [0]),
        (MODEL, "self_attention.linear_proj", 12, [12], [0]),
        (LATENT, "self_attention.linear_q_down_proj", 6, [6], [0]),
        (LATENT, "self_attention.linear_q_up_proj", 18, [12, 6], [0, 4]),
        (LATENT, "self_attention.linear_kv_down_proj", 7, [5, 2], [0, 5]),
        (LATENT, "self_attention.linear_kv_up_proj", 21, [12, 9], [0, 4]),
    ],
)
def test_fused_tensors_are_the_matrices_of_the_model(
    model: ModelSection, module: str, num_rows: int, sizes: list[int], first_rows: list[int]
) -> None:
    name = f"decoder.layers.0.{module}.weight"
    rows = matrices(name, num_rows, model)
    assert [len(each) for each in rows] == sizes
    assert [int(each[0]) for each in rows] == first_rows
    assert torch.equal(torch.cat(rows).sort().values, torch.arange(num_rows))
    weights, gradient = drawn(0, (num_rows, 8)), drawn(1, (num_rows, 8))
    fused = ExactMuon(section(), model).updated({name: weights}, {name: gradient}, 1.0, LR).weights[name]
    for each in rows:
        apart = ExactMuon(section(), model).updated({NAME: weights[each]}, {NAME: gradient[each]}, 1.0, LR)
        np.testing.assert_allclose(fused[each], apart.weights[NAME], rtol=1e-12)


def float32_steps(weights: np.ndarray, gradients: list[np.ndarray], wide: bool) -> list[np.ndarray]:
    """Makes the same operations in float32 in another order: with columns reversed, or on the transpose."""
    options = section()
    value, mean = torch.from_numpy(weights.copy()), torch.zeros(weights.shape)
    found = []
    for gradient in map(torch.from_numpy, gradients):
        mean = 0.95 * mean + (1 - 0.95) * gradient
        x: Tensor = (gradient + (mean - gradient) * 0.95).flip(1)
        x = x.T if wide else x
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
        x = (x.T if wide else x).flip(1)
        value = value * (1 - LR * options.weight_decay) - LR * 0.2 * max(weights.shape) ** 0.5 * x
        found.append(value.numpy().copy())
    return found


@pytest.mark.parametrize("shape", [(8, 8), (16, 48), (64, 64), (40, 8)])
@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("wide", [True, False])
def test_another_order_of_float32_is_within_the_bound_and_a_wrong_step_is_not(
    shape: tuple[int, int], rank: int | None, wide: bool
) -> None:
    """The bound holds where most singular values are 0, too, where rounding grows."""
    rows, columns = shape
    gradients = [
        drawn(seed, shape) if rank is None else drawn(seed, (rows, rank)) @ drawn(seed + 9, (rank, columns))
        for seed in range(3)
    ]
    exact, before, worst, wrong = ExactMuon(section(), MODEL), drawn(5, shape, 0.02), 0.0, 0.0
    for step, (new, gradient) in enumerate(zip(float32_steps(before, gradients, wide), gradients), start=1):
        found = exact.updated({NAME: before}, {NAME: gradient}, 1.0, LR)
        bound = update_tolerance(step) * found.scales[NAME]
        worst = max(worst, float((np.abs(new - found.weights[NAME]) / bound).max()))
        slip = 0.01 * (found.weights[NAME] - before)  # an update that is 1 % too small
        wrong = max(wrong, float((np.abs(slip) / bound).max()))
        before = new
    assert 0.001 < worst < 0.5
    assert wrong > 2
