"""Products of experts: both ways alike, empty experts, and what is chosen where."""

import pytest
import torch

from mtrain.base.errors import ConfigError
from mtrain.mcore.model.moe.grouped_gemm import chosen_product, grouped, has_grouped, sequential


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
        with pytest.raises(
            ConfigError, match=r"model\.experts\.implementation=grouped cannot be used with .*; use auto"
        ):
            chosen_product("grouped", sizes, weight)
