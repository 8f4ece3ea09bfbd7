"""What an order of samples has to be, whatever it is: each sample once an epoch, sources in their shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Draw:
    """Where a sample of the run comes from."""

    source: int
    epoch: int
    index: int
    """In the source."""


def broken_order(turns: Sequence[Draw], sizes: Sequence[int], weights: Sequence[float]) -> Iterator[str]:
    """Says what is wrong with the first samples of a run.

    Args:
        turns: Of samples 0, 1, 2, ...
        sizes: Samples of each source in an epoch.
        weights: Shares of the sources, relative to each other.
    """
    total = sum(weights)
    for source, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        own = [turn for turn in turns if turn.source == source]
        if abs(len(own) - len(turns) * weight / total) > 1 + len(turns) * 1e-5:  # shares are met to 1 in 100,000
            yield f"source {source} has {len(own)} of {len(turns)} samples, but its share is {weight / total:.6g}"
        if any(not 0 <= turn.index < size for turn in own):
            yield f"source {source} has {size} samples, but others are asked for"
        if len(set(own)) < len(own):
            yield f"source {source}: a sample comes twice in an epoch"
        if [turn.epoch for turn in own] != [number // size for number in range(len(own))]:
            yield f"source {source}: an epoch ends before each of its {size} samples has come"


def is_permutation(order: NDArray[np.int64], count: int) -> bool:
    """Whether each of so many documents comes once."""
    return len(order) == count and bool((np.bincount(order, minlength=count) == 1).all())
