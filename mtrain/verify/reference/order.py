"""Rules for any order of samples: each sample once per epoch, sources in their shares."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mtrain.base.spelling import counted


@dataclass(frozen=True)
class Draw:
    """Origin of a sample."""

    source: int
    epoch: int
    index: int


@dataclass(frozen=True)
class Shares:
    """Shares of sources from a sample onward."""

    first: int
    """Number of that sample, from 0."""
    weights: dict[int, float]
    """Relative shares by source; sources without a share are absent."""


def broken_order(turns: Sequence[Draw], sizes: Sequence[int], shares: Sequence[Shares]) -> Iterator[str]:
    """Reports faults in the order of a run's first samples, from their origins, the sources' sizes and their shares."""
    for number, blend in enumerate(shares):
        last = number + 1 == len(shares)
        yield from _broken_shares(turns[blend.first : None if last else shares[number + 1].first], len(sizes), blend)
    for source, size in enumerate(sizes):
        # over all blends: an epoch continues when the share of the source changes
        drawn = [turn for turn in turns if turn.source == source]
        if any(not 0 <= turn.index < size for turn in drawn):
            yield f"source {source} has {counted(size, 'sample')}, but the order asks for others"
        if len(set(drawn)) < len(drawn):
            yield f"source {source}: a sample appears twice in an epoch"
        if [turn.epoch for turn in drawn] != [number // size for number in range(len(drawn))]:
            yield f"source {source}: an epoch ends before each of its {counted(size, 'sample')} has appeared"
        first, second = ([turn.index for turn in drawn if turn.epoch == epoch] for epoch in (0, 1))
        yield from (f"source {source}: {fault}" for fault in unshuffled(first, second))


def _broken_shares(turns: Sequence[Draw], num_sources: int, blend: Shares) -> Iterator[str]:
    total = sum(blend.weights.values())
    for source in range(num_sources):
        count, share = sum(turn.source == source for turn in turns), blend.weights.get(source, 0.0) / total
        if abs(count - len(turns) * share) > 1 + len(turns) * 1e-5:  # shares are met to 1 in 100,000
            yield (
                f"source {source} has {count} of {counted(len(turns), 'sample')} from number {blend.first} on, but its "
                f"share is {share:.6g}"
            )


_ENOUGH = 12
"""Number of samples that chance puts in the same order less than once in a billion runs."""


def unshuffled(first: Sequence[int], second: Sequence[int]) -> Iterator[str]:
    """Reports epochs in file order or in equal order; arguments are beginnings of epochs, `second` may be empty."""
    if len(first) >= _ENOUGH and list(first) == list(range(len(first))):
        yield "the first epoch is in file order"
    both = min(len(first), len(second))
    if both >= _ENOUGH and list(first[:both]) == list(second[:both]):
        yield "the second epoch has the same order as the first"


def is_permutation(order: NDArray[np.int64], count: int) -> bool:
    """Says whether an order contains each of `count` documents exactly once."""
    return len(order) == count and bool((np.bincount(order, minlength=count) == 1).all())
