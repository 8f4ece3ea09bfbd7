"""Our own rotation against multiplication of complex numbers."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor

from mtrain.core.layers.attention.rotating import rotated, rotated_as_rounded, rotations_of, split_and_rotated


def angles(rows: int, seed: int = 0) -> Tensor:
    """Draws angles of shape [seq, rows, 1, 3]."""
    return 10 * torch.randn(5, rows, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def both(radians: Tensor) -> Tensor:
    """Angles as megatron-core has them."""
    return torch.cat((radians, radians), dim=-1)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("head_dim", [6, 8])
def test_pairs_rotate_as_complex_numbers(rows: int, head_dim: int) -> None:
    """Heads are views of a projection, as in attention; dimensions from 2 r on stay."""
    radians = angles(rows)
    mixed = torch.randn(5, 2, 4, head_dim + 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    heads = mixed[..., :head_dim]
    pairs = torch.complex(heads[..., :3], heads[..., 3:6]) * torch.polar(torch.ones_like(radians), radians)
    expected = torch.cat((pairs.real, pairs.imag, heads[..., 6:]), dim=-1)
    torch.testing.assert_close(
        rotated(heads, rotations_of(both(radians), heads.dtype)), expected, rtol=1e-12, atol=1e-12
    )
    in_float32 = rotated(heads.float(), rotations_of(both(radians), torch.float32))
    torch.testing.assert_close(in_float32.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("head_dim", [6, 8])
def test_its_gradient_is_the_derivative(head_dim: int) -> None:
    radians = angles(2)
    heads = torch.randn(5, 2, 2, head_dim, dtype=torch.float64, requires_grad=True)
    known = rotations_of(both(radians), heads.dtype)
    assert torch.autograd.gradcheck(lambda given: rotated(given, known), (heads,))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_projection_is_split_and_rotated(rows: int, num_queries: int) -> None:
    """Queries and keys are rotated as above and values copied to where attention reads them; the gradient is one."""
    radians = angles(rows)[:3]
    mixed = torch.randn(3, 2, 2, num_queries + 2, 8, dtype=torch.float64, requires_grad=True)
    known = rotations_of(both(radians), mixed.dtype)
    query, key, value = split_and_rotated(mixed, known)
    apart = [mixed[..., :-2, :].flatten(2, 3), mixed[..., -2, :], mixed[..., -1, :]]
    expected = [rotated(apart[0], known), rotated(apart[1], known), apart[2]]
    for found, wanted in zip((query, key, value), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert found.permute(1, 2, 0, 3).is_contiguous(), "positions of a head lie apart"
    assert torch.autograd.gradcheck(lambda given: split_and_rotated(given, known), (mixed,))


@pytest.mark.parametrize("head_dim", [6, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_has_the_bits_of_megatron_core(head_dim: int, dtype: torch.dtype) -> None:
    radians = both(angles(2)).float()
    heads = torch.randn(5, 2, 4, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = _apply_rotary_pos_emb_bshd(heads, radians)
    torch.testing.assert_close(rotated_as_rounded(heads, rotations_of(radians, dtype)), expected, rtol=0, atol=0)


def test_cosine_and_sine_are_found_once_for_all_layers() -> None:
    radians = both(angles(1)).float()
    first = rotations_of(radians, torch.float32)
    assert rotations_of(radians, torch.float32) is first
    torch.testing.assert_close(rotations_of(radians, torch.bfloat16).sine, radians.sin().bfloat16(), rtol=0, atol=0)
