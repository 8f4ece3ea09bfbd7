"""The norm of queries and keys over all heads is that of one process, whatever ranks hold the heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtrain.arch.layout import Layout
from tests.core.model import full_width_ranks
from tests.core.model.full_width_ranks import HEAD_DIM, Example, Found
from tests.pool import Pool

SEQ, ROWS, HEADS, EPSILON = 5, 3, 8, 1e-3
LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=4), Layout(tp=2, dp=2)]


def example(groups: int, dtype: torch.dtype = torch.float64) -> Example:
    generator = torch.Generator().manual_seed(groups)

    def draw(*shape: int) -> Tensor:
        # heads of very different size, so that a mean over some of them differs
        scale = torch.arange(1.0, 1 + shape[-2]).view(-1, 1) if len(shape) > 1 else 1.0
        return (torch.randn(*shape, dtype=torch.float64, generator=generator) * scale).to(dtype)

    query, key = (SEQ, ROWS, HEADS, HEAD_DIM), (SEQ, ROWS, groups, HEAD_DIM)
    return Example(draw(*query), draw(*key), draw(HEADS * HEAD_DIM), draw(groups * HEAD_DIM), draw(*query), draw(*key))


def pair(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    first, second = tensors
    return first, second


def expected(given: Example, is_zero_centered: bool) -> Found:
    """Computes the results from the definition, by autograd, in float64 on one process."""
    outputs, of_inputs, of_weights = [], [], []
    for x, weight, gradient in (
        (given.query, given.query_weight, given.query_gradient),
        (given.key, given.key_weight, given.key_gradient),
    ):
        x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
        flat = x.flatten(2)
        gain = 1 + weight if is_zero_centered else weight
        output = (flat / torch.sqrt(flat.square().mean(-1, keepdim=True) + EPSILON) * gain).view(x.shape)
        output.backward(gradient.double())
        assert x.grad is not None
        assert weight.grad is not None
        outputs.append(output.detach())
        of_inputs.append(x.grad)
        of_weights.append(weight.grad)
    return Found(pair(outputs), pair(of_inputs), pair(of_weights), [])


def assembled(found: list[Found], tp: int, name: str, number: int) -> Tensor:
    """Returns all heads, from the ranks of the first TP group."""
    parts = [getattr(each, name)[number] for each in found[:tp]]
    return torch.cat(parts, dim=2 if parts[0].ndim > 1 else 0)


@pytest.mark.parametrize("is_zero_centered", [False, True])
@pytest.mark.parametrize("groups", [8, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_is_the_norm_of_one_process(pool: Pool, layout: Layout, groups: int, is_zero_centered: bool) -> None:
    given = example(groups)
    found = pool.run(full_width_ranks.normalised, layout, given, is_zero_centered, EPSILON)
    exact = expected(given, is_zero_centered)
    for name in ("outputs", "input_gradients", "weight_gradients"):
        for number in (0, 1):
            whole = assembled(found, layout.tp, name, number)
            torch.testing.assert_close(whole, getattr(exact, name)[number], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_send_two_numbers_a_token_and_pass(pool: Pool, layout: Layout) -> None:
    for found in pool.run(full_width_ranks.normalised, layout, example(4), False, EPSILON):
        assert found.reduced == ([2 * SEQ * ROWS] * 2 if layout.tp > 1 else [])


def test_half_precision_is_rounded_once(pool: Pool) -> None:
    """Means, roots and weights are float32: the output is within half a unit in the last place of bfloat16, 2^-8."""
    given = example(4, torch.bfloat16)
    found = pool.run(full_width_ranks.normalised, Layout(tp=2), given, False, EPSILON)
    exact = expected(given, False)
    for number in (0, 1):
        whole = assembled(found, 2, "outputs", number)
        assert whole.dtype == torch.bfloat16
        torch.testing.assert_close(whole.double(), exact.outputs[number], rtol=2**-8 + 1e-6, atol=0)
