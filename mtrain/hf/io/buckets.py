"""Several tensors in one flat buffer of bytes, so that they travel as one message."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.base.tensor_slice import Sizes

_ALIGNMENT = 16
"""Alignment in bytes; a view of another dtype has to begin at a multiple of its element size."""


class TensorKind(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: Sizes

    @property
    def size_bytes(self) -> int:
        """Counts the bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def buffer_bytes(kinds: Sequence[TensorKind]) -> int:
    """Returns the length of a buffer that holds tensors of these kinds."""
    return _starts(kinds)[-1]


def views(buffer: Tensor, kinds: Sequence[TensorKind]) -> list[Tensor]:
    """Returns the tensors in a buffer as views.

    Args:
        buffer: [bytes] uint8.
        kinds: Kinds of the tensors, in the order in which they lie in the buffer.
    """
    return [
        buffer[start : start + kind.size_bytes].view(kind.dtype).view(kind.shape)
        for start, kind in zip(_starts(kinds), kinds)
    ]


def _starts(kinds: Sequence[TensorKind]) -> list[int]:
    """Returns where each tensor begins, followed by the length of the buffer."""
    aligned = (-(-kind.size_bytes // _ALIGNMENT) * _ALIGNMENT for kind in kinds)
    return list(itertools.accumulate(aligned, initial=0))
