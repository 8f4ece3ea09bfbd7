"""Tokens sorted by expert without reading sizes on the host match megatron-core's permutation, to the bit."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, get_capacity, permute

from mtrain.arch.layout import Layout
from mtrain.core.layers.moe.layer import by_expert, rows_by_expert
from tests.core.model.dispatcher_ranks import read_by_the_host, with_both
from tests.parity.batches import two_steps
from tests.parity.cases import case
from tests.parity.compare import initial_parameters, tensor_deviation
from tests.parity.expert_models import BIASED, DEEPSEEK, MIXTRAL, with_experts
from tests.pool import Pool

TOP_K = 3


@pytest.mark.parametrize("favoured", [None, 2], ids=["even", "experts without tokens"])
def test_choices_are_sorted_as_by_megatron_core(favoured: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(50, 9, generator=generator)
    if favoured is not None:
        scores[:, favoured : favoured + TOP_K] += 1  # all choose these, and nobody the others
    places = scores.topk(TOP_K, dim=1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, places, True)
    tokens, weights = torch.rand(50, 4, generator=generator), torch.where(chosen, scores, 0)
    # two more values in 0.19.2, of padding
    expected, expected_weights, token_of_row, *_ = permute(tokens, chosen, probs=weights, num_out_tokens=50 * TOP_K)
    rows = rows_by_expert(chosen, TOP_K)
    assert torch.equal(rows % 50, token_of_row)
    assert torch.equal(tokens.index_select(0, rows % 50), expected)
    assert expected_weights is not None
    assert torch.equal(weights.T.reshape(-1).index_select(0, rows), expected_weights)


@pytest.mark.parametrize("factor", [0.1, 0.6, 1.0, 1.7, 9.0])
@pytest.mark.parametrize("favoured", [None, 2], ids=["even", "experts without tokens"])
def test_with_a_capacity_every_expert_has_its_tokens_and_then_none(favoured: int | None, factor: float) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(50, 9, generator=generator)
    if favoured is not None:
        scores[:, favoured : favoured + TOP_K] += 1
    places = scores.topk(TOP_K, dim=1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, places, True)
    _, kept = apply_router_token_dropping(torch.where(chosen, scores, 0), chosen, TOP_K, factor)
    capacity = min(50, get_capacity(50 * TOP_K, 9, factor))
    rows = rows_by_expert(kept, TOP_K, capacity).view(9, capacity)
    for expert, own in enumerate(rows.tolist()):
        tokens = kept[:, expert].nonzero().flatten().tolist()
        assert own == [expert * 50 + token for token in tokens] + [9 * 50] * (capacity - len(tokens))


def test_rows_without_a_token_are_zeros_and_have_no_gradient() -> None:
    """A token that another expert never sees may be beyond what its weights can multiply."""
    tokens = torch.full((6, 4), torch.inf).requires_grad_()
    weights = torch.rand(6, 3).requires_grad_()
    chosen = torch.zeros(6, 3, dtype=torch.bool)
    chosen[1, 2] = True
    rows, found, token_of_row = by_expert(tokens, chosen, weights, 1, 2)
    assert rows[:, 0].tolist() == [0, 0, 0, 0, torch.inf, 0]
    assert found.tolist() == [0, 0, 0, 0, weights[1, 2].item(), 0]
    assert token_of_row[4] == 1
    gradients = torch.autograd.grad((rows.nan_to_num(posinf=1).sum() + found.sum()), [tokens, weights])
    assert [each.nonzero().tolist() for each in gradients][1] == [[1, 2]]


PERMITTED = {"loss__allow_layout_dependent": True}
CAPACITIES = [(MIXTRAL, 0.5), (MIXTRAL, 1.0), (BIASED, 1.3), (DEEPSEEK, 8.0)]


@pytest.mark.parametrize(("model", "factor"), CAPACITIES, ids=["half", "one", "biases", "all"])
def test_a_capacity_drops_and_adds_what_megatron_core_does(pool: Pool, model: dict[str, Any], factor: float) -> None:
    """Compares in float64; the sums of a token are in the same order."""
    asked = case(4, num_layers=2).config(**with_experts(model, capacity_factor=factor) | PERMITTED)
    ((ours, theirs),) = pool.run(with_both, Layout(), asked, initial_parameters(asked), two_steps()[0])
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-13)
    found, exact = ours.gradients, theirs.gradients
    assert found is not None
    assert exact is not None
    assert max(tensor_deviation(found[name], exact[name]) for name in exact) < 1e-12


@pytest.mark.parametrize(
    ("changes", "is_read"),
    [
        ({}, False),
        ({"capacity_factor": 1.25}, False),
        ({"capacity_factor": 0.5, "shared_ffn_hidden_size": 24}, False),
        ({"implementation": "sequential"}, True),  # splits tokens on the host
    ],
    ids=str,
)
def test_the_host_reads_nothing_of_a_layer_on_one_rank(pool: Pool, changes: dict[str, Any], is_read: bool) -> None:
    """All experts are on a rank, as with ep = 1: forward and backward on tensors that have no elements to read."""
    asked = case(2, num_layers=2).config(**with_experts(MIXTRAL, **changes) | PERMITTED | {"train__precision": "bf16"})
    assert pool.run(read_by_the_host, Layout(), asked) == [is_read]
