"""Our own rotation against multiplication of complex numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtrain.mcore.model.rotary.rotation import rotated, split_and_rotated


def angles(rows: int, seed: int = 0) -> Tensor:
    """[seq, rows, 1, 3]."""
    return 10 * torch.randn(5, rows, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("head_dim", [6, 8])
def test_pairs_turn_as_complex_numbers(rows: int, head_dim: int) -> None:
    """Heads are views of a projection, as they are in attention; dimensions from 2 r on stay."""
    turns = angles(rows)
    mixed = torch.randn(5, 2, 4, head_dim + 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    heads = mixed[..., :head_dim]
    pairs = torch.complex(heads[..., :3], heads[..., 3:6]) * torch.polar(torch.ones_like(turns), turns)
    expected = torch.cat((pairs.real, pairs.imag, heads[..., 6:]), dim=-1)
    torch.testing.assert_close(rotated(heads, turns.cos(), turns.sin()), expected, rtol=1e-12, atol=1e-12)
    in_float32 = rotated(heads.float(), turns.cos().float(), turns.sin().float())
    torch.testing.assert_close(in_float32.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("head_dim", [6, 8])
def test_its_gradient_is_the_derivative(head_dim: int) -> None:
    turns = angles(2)
    heads = torch.randn(5, 2, 2, head_dim, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda given: rotated(given, turns.cos(), turns.sin()), (heads,))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_projection_is_split_and_turned(rows: int, num_queries: int) -> None:
    """Queries and keys as above, values as they are, all where attention reads them; the gradient comes together."""
    turns = angles(rows)
    mixed = torch.randn(5, 2, 2, num_queries + 2, 8, dtype=torch.float64, requires_grad=True)
    query, key, value = split_and_rotated(mixed, turns.cos(), turns.sin())
    apart = [mixed[..., :-2, :].flatten(2, 3), mixed[..., -2, :], mixed[..., -1, :]]
    expected = [rotated(apart[0], turns.cos(), turns.sin()), rotated(apart[1], turns.cos(), turns.sin()), apart[2]]
    for found, wanted in zip((query, key, value), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert found.permute(1, 2, 0, 3).is_contiguous(), "positions of a head lie apart"
    assert torch.autograd.gradcheck(lambda given: split_and_rotated(given, turns.cos(), turns.sin()), (mixed,))
