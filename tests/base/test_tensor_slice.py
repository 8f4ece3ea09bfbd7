"""Slices of tensors against numpy's masks of the same indices."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mtrain.base.tensor_slice import TensorSlice

SHAPE = (4, 3, 5)


@st.composite
def slices(draw: Any) -> TensorSlice:
    offset = tuple(draw(st.integers(0, size)) for size in SHAPE)
    return TensorSlice(offset, tuple(draw(st.integers(0, size - first)) for first, size in zip(offset, SHAPE)))


def mask(at: TensorSlice) -> Tensor:
    """Marks the elements in the slice, one by one."""
    inside = [
        [all(first <= index < first + size for index, first, size in zip(indices, *at))]
        for indices in torch.cartesian_prod(*map(torch.arange, SHAPE)).tolist()
    ]
    return torch.tensor(inside).view(SHAPE)


@given(slices(), slices())
def test_what_two_slices_share_is_in_both(one: TensorSlice, other: TensorSlice) -> None:
    numbers = torch.arange(60).view(SHAPE)
    both = mask(one) & mask(other)
    shared = one.intersect(other)
    assert shared == other.intersect(one)
    assert (shared is None) == (not both.any())
    if shared is not None:
        assert torch.equal(shared.of(numbers).flatten(), numbers[both])
        assert torch.equal(shared.within(one).of(one.of(numbers)), shared.of(numbers))


@given(slices(), st.integers(1, 20))
def test_cuts_are_the_slice_in_order(at: TensorSlice, num_elements: int) -> None:
    numbers = torch.arange(60).view(SHAPE)
    parts = list(at.cut(num_elements))
    assert torch.equal(torch.cat([part.of(numbers).flatten() for part in parts]), at.of(numbers).flatten())
    assert sum(part.num_elements for part in parts) == at.num_elements == int(mask(at).sum())


def test_a_scalar_and_a_whole_tensor() -> None:
    assert TensorSlice.whole(()).num_elements == 1
    assert TensorSlice.whole((2, 3)).of(torch.ones(2, 3)).shape == (2, 3)
    assert list(TensorSlice.whole((4, 2)).cut(4)) == [TensorSlice((0, 0), (2, 2)), TensorSlice((2, 0), (2, 2))]
