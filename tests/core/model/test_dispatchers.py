"""Tokens sorted by expert without reading sizes on the host match megatron-core's permutation, to the bit."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute

from mtrain.core.layers.moe.layer import rows_by_expert

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
