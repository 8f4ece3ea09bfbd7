"""Products of experts: both implementations agree, empty experts work, and the right one is chosen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mtrain.base.errors import ConfigError
from mtrain.core.layers.moe import grouped_gemm
from mtrain.core.layers.moe.grouped_gemm import chosen_product, grouped, has_grouped, sequential
from tests.messages import refuses


@pytest.mark.parametrize("counts", [[5, 0, 3], [0, 0, 8], [8, 0, 0], [0, 0, 0]])
def test_both_products_are_those_of_each_expert(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(sum(counts), 8, generator=generator, requires_grad=True)
    weights = torch.randn(3, 12, 8, generator=generator, requires_grad=True)
    numbers = torch.arange(3).repeat_interleave(torch.tensor(counts))
    expected = torch.einsum("th,trh->tr", tokens, weights[numbers])
    upstream = torch.randn(expected.shape, generator=generator)
    exact = torch.autograd.grad(expected, [tokens, weights], upstream)
    for product in (sequential, grouped):
        found = product(tokens, weights, torch.tensor(counts))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for each, gradient in zip(torch.autograd.grad(found, [tokens, weights], upstream), exact, strict=True):
            torch.testing.assert_close(each, gradient, rtol=1e-5, atol=1e-5)


def test_the_grouped_product_is_taken_where_it_is() -> None:
    single, double, narrow = torch.zeros(2, 8, 8), torch.zeros(2, 8, 8).double(), (8, 6)
    assert has_grouped("cpu", torch.float32)
    assert not has_grouped("cpu", torch.float64)
    assert chosen_product("auto", (8, 8), single) is grouped
    assert chosen_product("sequential", (8, 8), single) is sequential
    assert chosen_product("auto", (8, 8), double) is sequential
    assert chosen_product("auto", narrow, single) is sequential
    for sizes, weight in (((8, 8), double), (narrow, single)):
        with refuses(ConfigError, "model.experts.implementation=grouped"):
            chosen_product("grouped", sizes, weight)


class Grouped(torch.autograd.Function):
    """Imitates a kernel of some devices: it writes only the rows of experts that have tokens."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weights, ends)
        return torch.cat([part @ weight for part, weight in zip(split(tokens, ends), weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        tokens, weights, ends = ctx.saved_tensors
        parts, gradient = list(split(upstream[0], ends)), torch.empty_like(weights)
        for number, (part, own) in enumerate(zip(split(tokens, ends), parts, strict=True)):
            if len(part):
                gradient[number] = part.t() @ own
        return torch.cat([own @ weight.t() for own, weight in zip(parts, weights, strict=True)]), gradient, None


def split(rows: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(rows, ends.diff(prepend=ends.new_zeros(1)).tolist())


def with_all_gradients(tokens: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    return torch.cat([part @ weight for part, weight in zip(split(tokens, offs), weights, strict=True)])


def without_the_last_bit(tokens: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    return with_all_gradients(tokens, weights, offs=offs) * 1.001


def of_the_first_expert(tokens: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    return with_all_gradients(tokens, weights[:1].expand_as(weights), offs=offs)


@pytest.mark.parametrize(
    ("kernel", "is_right"),
    [
        (with_all_gradients, True),
        (lambda tokens, weights, offs: Grouped.apply(tokens, weights, offs), False),
        (without_the_last_bit, False),
        (of_the_first_expert, False),
    ],
)
def test_a_kernel_that_gives_other_numbers_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., torch.Tensor], is_right: bool
) -> None:
    found = []

    def observed(*operands: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        found.append(torch.empty(1000).isnan().all())
        return kernel(*operands, offs=offs)

    monkeypatch.setattr(grouped_gemm, "_grouped_mm", observed)
    assert has_grouped.__wrapped__("cpu", torch.float32) == is_right
    assert all(found), "a kernel that leaves memory as it is may find the right numbers there"
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_kernel_of_this_torch_is_right_in_every_dtype_that_it_takes() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert has_grouped.__wrapped__("cpu", dtype)
