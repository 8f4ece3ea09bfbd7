"""Products in fp8 in our own layers: codes by their definition, and no code that a layout changes."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.core import kernels
from mtrain.core.layers import fp8
from mtrain.core.layers.fp8 import BLOCK, Recipe, largest, multiplied, product, scaled
from tests.config.samples import config
from tests.core.fp8.fp8_ranks import Step, classes, linears, steps
from tests.messages import refuses
from tests.parity.batches import SEQ, two_steps
from tests.parity.cases import Case, case
from tests.parity.compare import initial_parameters, tensor_deviation
from tests.parity.expert_models import MIXTRAL, with_experts
from tests.parity.image_models import Kind
from tests.parity.images import MIXED, initial, knobs
from tests.parity.images import drawn as drawn_with_images
from tests.parity.layouts.test_packing import PACKED
from tests.parity.layouts.test_packing import steps as packed_steps
from tests.pool import Pool

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Matrix = NDArray[np.float64]


@cache
def magnitudes(form: torch.dtype) -> Matrix:
    """Returns the finite numbers of a format that are not negative, in the order of their codes."""
    bits, bias, count = (3, 7, 0x7F) if form == E4M3 else (2, 15, 0x7C)
    return np.array(
        [
            math.ldexp(code % 2**bits + (2**bits if code >> bits else 0), max(code >> bits, 1) - bias - bits)
            for code in range(count)
        ]
    )


def quantised(matrix: Matrix, height: int, width: int, form: torch.dtype) -> tuple[NDArray[np.uint8], Matrix]:
    """Returns codes, and the scale of each group, by their definition, in float64."""
    table = magnitudes(form)
    codes = np.zeros(matrix.shape, np.uint8)
    scales = np.zeros((matrix.shape[0] // height, matrix.shape[1] // width))
    for row, column in np.ndindex(*scales.shape):
        place = np.s_[row * height : (row + 1) * height, column * width : (column + 1) * width]
        exponent, most = -126, np.abs(matrix[place]).max()
        while most > table[-1] * 2.0**exponent:
            exponent += 1
        scales[row, column] = 2.0**exponent
        given = np.abs(matrix[place]) / 2.0**exponent
        above = np.searchsorted(table, given).clip(1, len(table) - 1)
        low, high = given - table[above - 1], table[above] - given
        is_high = (high < low) | ((high == low) & (above % 2 == 0))
        codes[place] = np.where(is_high, above, above - 1) | np.where(np.signbit(matrix[place]), 0x80, 0)
    return codes, scales


def decoded(matrix: Matrix, height: int, width: int, form: torch.dtype) -> Matrix:
    codes, scales = quantised(matrix, height, width, form)
    sizes = scales.repeat(height, 0).repeat(width, 1)
    values: Matrix = np.where(codes & 0x80, -1, 1) * magnitudes(form)[codes & 0x7F] * sizes
    return values


def drawn(seed: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Draws numbers of many sizes, with ties, zeros and rows of zeros."""
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.integers(-30, 30, (rows, 1)) * 2.0 ** rng.integers(-12, 3, (rows, columns))
    numbers = rng.standard_normal((rows, columns)) * sizes
    numbers[rng.random(numbers.shape) < 0.1] = 0
    is_tie = rng.random(numbers.shape) < 0.3
    numbers = np.where(is_tie, np.sign(numbers) * rng.integers(1, 64, numbers.shape) * sizes, numbers)
    numbers[seed % rows] = 0
    numbers[(seed + 1) % rows] *= 2.0**-110  # below what a scale can lift
    return torch.from_numpy(numbers).to(dtype)


GROUPS = [(1, BLOCK), (BLOCK, BLOCK), (1, 2 * BLOCK)]


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_codes_are_the_nearest_and_scales_the_smallest(dtype: torch.dtype, form: torch.dtype) -> None:
    for seed in range(6):
        numbers = drawn(seed, 2 * BLOCK, 2 * BLOCK, dtype)
        if dtype == torch.float64:
            numbers = numbers.float().double()  # torch rounds to float32 on its way to 8 bits
        for height, width in GROUPS:
            for given in (numbers, numbers.t()):
                found = scaled(given, largest(given, height, width), form)
                codes, scales = quantised(given.double().numpy(), height, width, form)
                assert np.array_equal(found.codes.contiguous().view(torch.uint8).numpy(), codes)
                assert np.array_equal(found.scales.double().numpy(), scales)


def test_what_is_not_finite_stays_so_in_its_own_group() -> None:
    for wrong in (math.nan, math.inf, -math.inf):
        numbers = torch.ones(3, 4)
        numbers[1, 2] = wrong
        found = scaled(numbers, largest(numbers, 1, 4), E4M3)
        assert found.codes.float().isnan().all(1).tolist() == [False, True, False]
        assert product(numbers, torch.ones(4, 5), E4M3, False, None).isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_scaling_has_the_same_codes(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BACKEND", backend)
    for seed, dtype in ((11, torch.bfloat16), (12, torch.float32)):  # the second one transposed: each needs a graph
        numbers = drawn(seed, 2 * BLOCK, 2 * BLOCK, dtype)
        given = numbers if dtype == torch.bfloat16 else numbers.t()
        for height, width in GROUPS:
            with torch.no_grad():
                compiled = largest.compiled_if(True)(given, height, width)
                found = scaled.compiled_if(True)(given, compiled, E5M2)
            expected = scaled(given, largest(given, height, width), E5M2)
            assert torch.equal(found.scales, expected.scales)
            assert torch.equal(found.codes.float(), expected.codes.float())


def test_scaled_mm_of_torch_has_the_same_law() -> None:
    """The call of a GPU, on codes and scales of rows, which a CPU can multiply as well."""
    a, b = drawn(3, 48, 64, torch.float32), drawn(4, 32, 64, torch.float32)
    left, right = scaled(a, largest(a, 1, 64), E4M3), scaled(b, largest(b, 1, 64), E4M3)
    kind = functional.ScalingType.RowWise
    theirs = functional.scaled_mm(
        left.codes, right.codes.t(), left.scales, kind, right.scales.t(), kind, output_dtype=torch.float32
    )
    torch.testing.assert_close(
        multiplied(left, right, torch.float32), theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max())
    )


@pytest.mark.parametrize("is_blockwise", [False, True])
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("sizes", [(5, 128, 256), (48, 640, 128), (16, 256, 384)], ids=str)
def test_a_gpu_is_given_what_its_product_takes(
    sizes: tuple[int, int, int], form: torch.dtype, is_blockwise: bool
) -> None:
    """Shapes, strides and alignment, by torch's own checks for CUDA, which tensors without memory get as well."""
    tokens, columns, rows = sizes
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    for weight in (empty(rows, columns).t(), empty(columns, rows)):
        found = product(empty(tokens, 1, columns), weight, form, is_blockwise, None)
        assert (found.shape, found.dtype, found.device.type) == ((tokens, 1, rows), torch.bfloat16, "meta")


def test_a_gpu_without_the_product_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> torch.Tensor:
        raise NotImplementedError("only on sm90")

    assert fp8.has_products(Recipe(True, E5M2), "cpu", is_bf16=True)
    monkeypatch.setattr(fp8, "multiplied", missing)
    assert not fp8.has_products.__wrapped__(Recipe(True, E5M2), "cpu", True)
    monkeypatch.setattr(fp8, "has_products", lambda *_: False)
    asked = config(train__fp8="hybrid", train__fp8_recipe="blockwise", **WIDE)
    with refuses(ConfigError, "train.fp8=hybrid", "train.fp8_recipe=blockwise", "scaled_mm"):
        fp8.use_fp8(torch.nn.Module(), asked, torch.device("cuda"))


SMALL: dict[str, Any] = {"model__hidden_size": 64, "model__ffn_hidden_size": 64, "model__backend": "torch"}
WIDE: dict[str, Any] = SMALL | {
    "model__hidden_size": 128,
    "model__ffn_hidden_size": 256,
    "model__num_attention_heads": 8,
    "model__num_query_groups": 4,
    "model__head_dim": 32,
}
IN_FP8 = {
    "rowwise": SMALL | {"train__fp8": "hybrid"},
    "blockwise": WIDE | {"train__fp8": "e4m3", "train__fp8_recipe": "blockwise"},
}


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, sp=True)], ids=str)
@pytest.mark.parametrize("recipe", IN_FP8)
def test_a_linear_layer_multiplies_by_its_law(pool: Pool, recipe: str, layout: Layout) -> None:
    asked = case(num_layers=1).config(**WIDE | IN_FP8[recipe] | {"model__hidden_size": 256})
    x, w, dy = (drawn(seed, 24 if seed < 7 else 256, 256, torch.float64).numpy() for seed in (5, 8, 6))
    gradients, block = (E5M2, (1, 256)) if recipe == "rowwise" else (E4M3, (BLOCK, BLOCK))
    width = block[1]
    expected = (
        decoded(x, 1, width, E4M3) @ decoded(w, *block, E4M3).T,
        decoded(dy, 1, width, gradients) @ decoded(w.T, *block, E4M3).T,
        dy.T @ x,
    )
    everyone = pool.run(linears, layout, asked, x[:, None], w, dy[:, None])
    own_tokens = 0 if layout.sp else None
    axes = {"column": (2, own_tokens, 0), "row": (own_tokens, 2, 1)}
    for kind, places in axes.items():
        for number, (axis, whole) in enumerate(zip(places, expected, strict=True)):
            parts = [getattr(rank, kind)[number] for rank in everyone]
            found = parts[0] if axis is None else np.concatenate(parts, axis)
            np.testing.assert_allclose(found.reshape(whole.shape), whole, rtol=1e-12, atol=1e-12 * np.abs(whole).max())


MOE = with_experts(MIXTRAL, shared_ffn_hidden_size=64)
LAYOUTS: dict[str, list[tuple[Case, dict[str, Any]]]] = {
    "rowwise": [
        (case(4, num_layers=2), {}),
        (case(2, num_layers=2, tp=2, sp=True), {}),
        (case(8, num_layers=2, tp=2), {}),
        (case(4, num_layers=2, cp=2), {}),
        (case(4, num_layers=2, pp=2), {}),
        (case(4, num_layers=2, dp=2), {}),
        (case(8, num_layers=2), {"train__recompute": "full"}),
        (case(4, num_layers=2, tp=2, sp=True, dp=2), MOE),
        (case(4, num_layers=2, dp=2, ep=2), MOE),
    ],
    "blockwise": [(case(4, num_layers=2, tp=2, sp=True), {}), (case(8, num_layers=2, cp=2), {})],
}
ROWS = [(recipe, *row) for recipe, rows in LAYOUTS.items() for row in rows]


@cache
def alone(pool: Pool, recipe: str, is_moe: bool) -> Step:
    return layout_step(pool, recipe, case(num_layers=2), MOE if is_moe else {})[0]


def layout_step(pool: Pool, recipe: str, one: Case, changes: dict[str, Any], batch: Any = None) -> list[Step]:
    batch = two_steps()[0][::2] if batch is None else batch
    asked = one.config(**IN_FP8[recipe] | changes, train__global_batch_size=len(batch))
    given = asked, initial_parameters(asked), batch
    return [found for (found,) in pool.run(steps, one.resolved(asked), [given])]


@pytest.mark.parametrize(
    ("recipe", "one", "changes"),
    ROWS,
    ids=[f"{r}-{c.layout}-{c.micro_batch_size}{'-more' * bool(m)}" for r, c, m in ROWS],
)
def test_no_layout_changes_a_code(pool: Pool, recipe: str, one: Case, changes: dict[str, Any]) -> None:
    """Every piece of every operand, forward and backward, has the codes and the scale of one process with one sample
    at a time; so loss and gradients are equal to the rounding of float64."""
    expected = alone(pool, recipe, changes is MOE)
    everyone = layout_step(pool, recipe, one, changes)
    assert set().union(*(rank.codes for rank in everyone)) == expected.codes
    assert_same(everyone, expected)
    assert len(expected.codes) > 10_000


def assert_same(everyone: list[Step], expected: Step) -> None:
    assert all(rank.loss == pytest.approx(expected.loss, rel=1e-12) for rank in everyone)
    found, exact = everyone[0].gradients, expected.gradients
    assert found is not None
    assert exact is not None
    assert max(tensor_deviation(found[name][: len(exact[name])], exact[name]) for name in exact) < 1e-11


def test_no_layout_changes_a_code_of_a_token_of_an_image(pool: Pool) -> None:
    """Only a language model's layers multiply in fp8; the other rank encodes some of the images."""
    kind: Kind = "deepstack"
    batch = drawn_with_images(MIXED, 1, (32, 17, 9, 24, 30), kind)
    everyone = []
    for one in (case(num_layers=3), case(2, num_layers=3, cp=2, dp=2)):
        images = knobs(kind, freeze_tower=False, freeze_projector=False) | {"model__backend": "torch"}
        asked = one.config(**images, train__fp8="hybrid", train__global_batch_size=len(batch))
        ranks = pool.run(steps, one.resolved(asked), [(asked, initial(kind), batch)])
        everyone.append([found for (found,) in ranks])
    (expected,), found = everyone
    assert set().union(*(rank.codes for rank in found)) == expected.codes
    assert_same(found, expected)
    assert len(expected.codes) > 10_000


def test_packed_rows_have_the_gradients_of_rows_of_their_own(pool: Pool) -> None:
    batch = packed_steps()[0]
    alone, packed = (
        layout_step(pool, "rowwise", case(num_layers=2), each, batch)
        for each in ({}, PACKED | {"train__tokens_per_micro_batch": 2 * SEQ})
    )
    assert_same(packed, alone[0])


def test_only_parallel_linear_layers_inside_layers_multiply_in_fp8(pool: Pool) -> None:
    asked = case(num_layers=1).config(**IN_FP8["rowwise"] | MOE)
    (found,) = pool.run(classes, Layout(), asked)
    assert {name.split("layers.0.")[-1] for name, is_in_fp8 in found.items() if is_in_fp8} == {
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "mlp.shared_experts.linear_fc1",
        "mlp.shared_experts.linear_fc2",
    }
    others = {name.split("layers.0.")[-1] for name, is_in_fp8 in found.items() if not is_in_fp8}
    assert {"embedding.word_embeddings", "output_layer", "mlp.router", "mlp.experts.linear_fc1"} <= others
