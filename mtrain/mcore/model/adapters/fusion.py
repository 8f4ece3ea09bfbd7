"""Layout of the parts of a fused projection: queries, keys and values of each group, gate and up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Fusion(NamedTuple):
    """The outputs of a linear module on one rank: a number of groups, each with the same share of every part."""

    groups: int
    sizes: tuple[int, ...]
    """Number of outputs of each part in one group."""

    def width(self, part: int) -> int:
        """Returns the number of outputs of one part."""
        return self.groups * self.sizes[part]

    def joined(self, parts: Sequence[Tensor | None], fill: float, like: Tensor) -> Tensor:
        """Joins parts, whose last axis are outputs in the order of the heads, in the order of the fused module.

        Args:
            parts: Tensors [..., width]; None for a missing part, which becomes `fill`.
            fill: Value of missing parts.
            like: Tensor [..., any] that gives the other axes, dtype and device.
        """
        if len(parts) == 1 and parts[0] is not None:
            return parts[0]
        lead = like.shape[:-1]
        blocks = [
            like.new_full((), fill).expand(*lead, self.groups, size)
            if part is None
            else part.reshape(*lead, self.groups, size)
            for part, size in zip(parts, self.sizes, strict=True)
        ]
        return torch.cat(blocks, dim=-1).flatten(-2)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Reverses `joined`: [..., all outputs] -> [..., width] of each part."""
        if len(self.sizes) == 1:
            return [whole]
        grouped = whole.reshape(*whole.shape[:-1], self.groups, sum(self.sizes))
        edges = [0, *itertools.accumulate(self.sizes)]
        return [grouped[..., first:end].flatten(-2) for first, end in itertools.pairwise(edges)]
