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
"""Bytes; a view of another dtype has to begin at a multiple of its size."""


class TensorKind(NamedTuple):
    """What a tensor is, without its numbers."""

    dtype: torch.dtype
    shape: Sizes

    @property
    def size_bytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def buffer_bytes(kinds: Sequence[TensorKind]) -> int:
    """Length of a buffer that holds tensors of these kinds."""
    return _starts(kinds)[-1]


def views(buffer: Tensor, kinds: Sequence[TensorKind]) -> list[Tensor]:
    """The tensors in a buffer.

    Args:
        buffer: [bytes] uint8.
        kinds: In the order in which they lie there.
    """
    return [
        buffer[start : start + kind.size_bytes].view(kind.dtype).view(kind.shape)
        for start, kind in zip(_starts(kinds), kinds)
    ]


def _starts(kinds: Sequence[TensorKind]) -> list[int]:
    """Where each tensor begins, and behind them how long the buffer is."""
    aligned = (-(-kind.size_bytes // _ALIGNMENT) * _ALIGNMENT for kind in kinds)
    return list(itertools.accumulate(aligned, initial=0))
