"""How the parts of a fused projection lie in it: queries, keys and values of each group, gate and up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Fusion(NamedTuple):
    """The outputs of a linear module on one rank: so many groups, in each of them the same share of every part."""

    groups: int
    sizes: tuple[int, ...]
    """Outputs of each part in one group."""

    def width(self, part: int) -> int:
        """Outputs of one part."""
        return self.groups * self.sizes[part]

    def joined(self, parts: Sequence[Tensor | None], fill: float, like: Tensor) -> Tensor:
        """Parts, whose last axis are outputs in the order of the heads, in the order of the fused module.

        Args:
            parts: [..., width]; None for one that is not there, which becomes `fill`.
            fill: The value of such parts.
            like: [..., any]: the other axes, dtype and device.
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
        """The inverse of `joined`: [..., all outputs] -> [..., width] of each part."""
        if len(self.sizes) == 1:
            return [whole]
        grouped = whole.reshape(*whole.shape[:-1], self.groups, sum(self.sizes))
        edges = [0, *itertools.accumulate(self.sizes)]
        return [grouped[..., first:end].flatten(-2) for first, end in itertools.pairwise(edges)]
