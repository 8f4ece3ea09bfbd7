"""Tokens sorted by expert without reading sizes on the host match megatron-core's permutation, to the bit."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, get_capacity, permute
from torch import Tensor

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.core.layers.moe.layer import by_expert, rows_by_expert
from mtrain.verify.reference.objective import Evaluated
from tests.core.fp8.fp8_ranks import Step, steps
from tests.core.model.dispatcher_ranks import read_by_the_host
from tests.parity.cases import Case, case, lean
from tests.parity.compare import initial_parameters, relative, worst
from tests.parity.expert_models import BIASED, DEEPSEEK, MIXTRAL, QWEN, with_experts
from tests.parity.layouts.test_packing import PACKED
from tests.parity.layouts.test_packing import steps as ragged_steps
from tests.parity.replay import dropping
from tests.pool import Pool
from tests.reference import evaluate

TOP_K = 3


def drawn(favoured: int | None) -> tuple[Tensor, Tensor]:
    """Draws scores of 50 tokens for 9 experts, and chooses TOP_K; all tokens choose those from `favoured` on."""
    scores = torch.rand(50, 9, generator=torch.Generator().manual_seed(0))
    if favoured is not None:
        scores[:, favoured : favoured + TOP_K] += 1
    return scores, torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(TOP_K, dim=1).indices, True)


FAVOURED = pytest.mark.parametrize("favoured", [None, 2], ids=["even", "experts without tokens"])


@FAVOURED
def test_choices_are_sorted_as_by_megatron_core(favoured: int | None) -> None:
    scores, chosen = drawn(favoured)
    tokens, weights = torch.rand(50, 4), torch.where(chosen, scores, 0)
    # two more values in 0.19.2, of padding
    expected, expected_weights, token_of_row, *_ = permute(tokens, chosen, probs=weights, num_out_tokens=50 * TOP_K)
    rows, found, of_row = by_expert(tokens, chosen, weights, TOP_K)
    assert torch.equal(of_row, token_of_row)
    assert torch.equal(rows, expected)
    assert expected_weights is not None
    assert torch.equal(found, expected_weights)


@pytest.mark.parametrize("factor", [0.1, 0.6, 1.0, 1.7, 9.0])
@FAVOURED
def test_with_a_capacity_every_expert_has_its_tokens_and_then_none(favoured: int | None, factor: float) -> None:
    scores, chosen = drawn(favoured)
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
MOE = {"train__recompute": "selective", "train__recompute_modules": ["moe"]}
CAPACITIES: dict[str, tuple[Case, dict[str, Any]]] = {
    "one rank, packed": (case(4), with_experts(QWEN, capacity_factor=0.6) | PACKED),
    "dp, recomputed": (case(4, dp=2), with_experts(DEEPSEEK, capacity_factor=0.7) | {"train__recompute": "full"}),
    "ep, sharded": (case(4, dp=2, ep=2), with_experts(BIASED, capacity_factor=0.5) | {"layout__shard": "weights"}),
    "ep over tp": (case(4, tp=2, sp=True, ep=2), with_experts(MIXTRAL, capacity_factor=0.5)),
    "ep and pp": (case(2, pp=2, vpp=2, dp=2, ep=2), with_experts(MIXTRAL, capacity_factor=0.8)),
    "ep and etp": (case(4, tp=2, sp=True, dp=2, ep=2, etp=2), with_experts(DEEPSEEK, capacity_factor=0.9) | MOE),
    "ep over cp, packed": (case(4, cp=2, dp=2, ep=4), with_experts(MIXTRAL, capacity_factor=1.0) | PACKED),
}


def difference(found: Step, exact: Evaluated, asked: Config) -> float:
    """Returns the largest relative deviation, of the loss and of the gradients."""
    gradients = {name: value.numpy() for name, value in exact.gradients.items()}
    return max(relative(found.loss, exact.objective), worst(found.gradients, gradients, asked))


@pytest.mark.parametrize("name", CAPACITIES)
def test_a_capacity_drops_the_least_probable_tokens_of_a_rank(pool: Pool, name: str) -> None:
    """Compares loss and gradients in float64; the oracle does not know ep, etp and pp, nor what padding chooses."""
    one, changes = CAPACITIES[name]
    asked = lean(one).config(**changes | PERMITTED)
    layout, batch, weights = one.resolved(asked), ragged_steps()[1], initial_parameters(asked)
    found = pool.run(steps, layout, [(asked, weights, batch)])[0][0]
    with dropping(batch, asked, layout) as dropped:
        exact = evaluate(asked, weights, batch)
    assert sum(dropped) > 0
    assert difference(found, exact, asked) < 1e-12
    assert difference(found, evaluate(asked, weights, batch), asked) > 1e-3


OF_TENSORS = Layout(tp=2, sp=True, dp=2, ep=2, etp=2)
ROOMY, TIGHT = {"capacity_factor": 1.25}, {"capacity_factor": 0.5, "shared_ffn_hidden_size": 24}


@pytest.mark.parametrize(
    ("layout", "changes", "is_read"),
    [
        (Layout(), {}, False),
        (Layout(), ROOMY, False),
        (Layout(), TIGHT, False),
        (Layout(), {"implementation": "sequential"}, True),  # splits tokens on the host
        (Layout(dp=2, ep=2), TIGHT, False),
        (Layout(dp=2, ep=2), {}, True),
        # grouped products need 16 bytes of a row on each rank
        (OF_TENSORS, ROOMY | {"ffn_hidden_size": 32}, False),
    ],
    ids=str,
)
def test_the_host_reads_nothing_of_a_layer(pool: Pool, layout: Layout, changes: dict[str, Any], is_read: bool) -> None:
    """Runs forward and backward on tensors that have no elements to read."""
    degrees = {name: getattr(layout, name) for name in ("tp", "sp", "ep", "etp")}
    asked = case(2, num_layers=2, **degrees).config(
        **with_experts(MIXTRAL, **changes) | PERMITTED | {"train__precision": "bf16"}
    )
    assert pool.run(read_by_the_host, layout, asked) == [is_read] * layout.world_size
