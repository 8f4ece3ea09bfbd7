"""The order of samples: sample number g of a run is a function of (seed, g), without state.

Therefore a run that resumes at step k reads the same samples as an uninterrupted run, on any number of ranks. No random
number generator of a library is involved, since their streams change between versions.
"""

import bisect
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import ConfigError

Word = TypeVar("Word", int, NDArray[Any])
"""An int below 2^64, or an array of uint64."""

PERIOD_LIMIT = 100_000
"""Longest period of a blend, in samples; shares are multiples of 1/100000 at the finest."""

_MASK = (1 << 64) - 1
# four rounds make a Feistel network pseudo-random (Luby and Rackoff 1988); two more are a margin
_ROUNDS = 6


def mix(word: Word) -> Word:
    """Scrambles 64 bits, one-to-one, by the finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def key_of(*words: int) -> int:
    """Hashes non-negative words to 64 bits that depend on every word and on their order."""
    # starts with the length, so that (1,) and (1, 0) differ
    key = len(words)
    for word in words:
        key = mix((mix(key) + word * 0x9E3779B97F4A7C15 + 1) & _MASK)
    return key


def _exchange(word: Word, half_bits: int, key: int) -> Word:
    """Applies a Feistel network to 2 * half_bits bits, which is one-to-one for any round function."""
    mask = (1 << half_bits) - 1
    left, right = word >> half_bits, word & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (mix(right ^ mix(key + turn & _MASK)) & mask)
    return (left << half_bits) | right


def _half_bits(size: int) -> int:
    # the smallest even number of bits for the range spans less than 4 x size, so few values fall outside
    return max(1, ((size - 1).bit_length() + 1) // 2)


def permuted(index: int, size: int, key: int) -> int:
    """Returns the image of `index` under the pseudo-random permutation of range(size) that belongs to the key; O(1).

    Values outside the range are permuted again until they fall into it, which takes less than four rounds on average.
    """
    half_bits = _half_bits(size)
    word = _exchange(index, half_bits, key)
    while word >= size:
        word = _exchange(word, half_bits, key)
    return word


def permutation(size: int, key: int) -> NDArray[np.int64]:
    """Returns `permuted` of every index, [size] int64."""
    return all_permuted(np.arange(size), size, key)


def all_permuted(indices: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Returns `permuted` of each index, [n] int64."""
    half_bits = _half_bits(size)
    # uint64 wraps around like ints with `_MASK`, so both functions give the same numbers
    words = _exchange(indices.astype(np.uint64), half_bits, key)
    while (outside := np.flatnonzero(words >= size)).size:
        words[outside] = _exchange(words[outside], half_bits, key)
    return words.astype(np.int64)


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Scales the weights to whole numbers in the same proportion, with a sum of at most PERIOD_LIMIT.

    The result is exact if the decimals allow it (0.7 and 0.3 give 7 and 3). Otherwise shares are rounded to multiples
    of 1 / PERIOD_LIMIT by the largest-remainder method.

    Raises:
        ConfigError: The share of a source is below 1 / PERIOD_LIMIT.
    """
    # from the decimal notation: as a binary fraction, 0.7 would need a period of 2^52
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    whole = [weight * math.lcm(*(fraction.denominator for fraction in exact)) for weight in exact]
    divisor = math.gcd(*(int(weight) for weight in whole))
    whole = [weight / divisor for weight in whole]
    if sum(whole) <= PERIOD_LIMIT:
        return [int(weight) for weight in whole]
    # fractions, so that the rounding below is the same on every machine
    shares = [weight / total * PERIOD_LIMIT for weight in exact]
    for position, share in enumerate(shares):
        if share < 1:
            raise ConfigError(
                f"weight {weights[position]} of source {position} is less than 1/{PERIOD_LIMIT} of the sum "
                f"{float(total)}; raise it or remove the source"
            )
    parts = [int(share) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - shares[i], i))
    for position in by_remainder[: PERIOD_LIMIT - sum(parts)]:
        parts[position] += 1
    return parts


class BlendPosition(NamedTuple):
    """Position of one sample of a blend in its source."""

    source: int
    number: int
    """Number of earlier samples of this source."""


class Blend:
    """Assigns samples to sources so that after any n samples source i has n * w_i of them, to within 1.

    Tijdeman's rule (The chairman assignment problem, 1980) picks, among the sources that are not ahead, the one whose
    share falls due first. If all shares are multiples of 1/P, the error is 0 after P samples, so the sequence repeats;
    one period is computed and then looked up.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.parts = whole_weights(weights)
        self.period = sum(self.parts)
        self._source = _one_period(self.parts)
        self._number = np.empty(self.period, np.int64)
        self._turns = [np.flatnonzero(self._source == source) for source in range(len(self.parts))]
        """Turns of each source in the period, [part]."""
        for turns in self._turns:
            self._number[turns] = np.arange(len(turns))

    def locate(self, n: int) -> BlendPosition:
        """Returns the position of sample n, counted from 0; O(1)."""
        periods, turn = divmod(n, self.period)
        source = int(self._source[turn])
        return BlendPosition(source, periods * self.parts[source] + int(self._number[turn]))

    def locate_all(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Locates many samples: returns [n] sources and [n] numbers, `locate` of each of the [n] numbers."""
        periods, turns = np.divmod(numbers, self.period)
        source = self._source[turns].astype(np.int64)
        return source, periods * np.array(self.parts)[source] + self._number[turns]

    def counts(self, n: int) -> list[int]:
        """Returns how many of the first n samples come from each source."""
        periods, turn = divmod(n, self.period)
        begun = [int(np.searchsorted(turns, turn)) for turns in self._turns]
        return [periods * part + count for part, count in zip(self.parts, begun)]

    def number_of(self, position: BlendPosition) -> int:
        """Returns the number of the sample at a position: the inverse of `locate`."""
        periods, turn = divmod(position.number, self.parts[position.source])
        return periods * self.period + int(self._turns[position.source][turn])

    def next_epoch(self, n: int, sizes: Sequence[int]) -> int:
        """Returns the number of the first sample that lies in a later epoch of its source than at sample n.

        `sizes` has the samples per epoch of each source.
        """
        ends = [(count // size + 1) * size for count, size in zip(self.counts(n), sizes)]
        return min(self.number_of(BlendPosition(source, end)) for source, end in enumerate(ends))


@dataclass(frozen=True)
class BlendPhase:
    """A blend that applies from sample `first` on."""

    first: int
    """Number of the first sample, counted from 0 over the run."""
    sources: tuple[int, ...]
    weights: tuple[float, ...]


class BlendPhases:
    """A sequence of blends. A source continues where the previous phase left it, so each of its epochs stays whole."""

    def __init__(self, phases: Sequence[BlendPhase], num_sources: int) -> None:
        """Takes phases in ascending order; the first one begins at sample 0."""
        self._firsts = [phase.first for phase in phases]
        self._blends = [Blend(phase.weights) for phase in phases]
        self._sources = [np.array(phase.sources) for phase in phases]
        # number of samples of each source before each phase, computed in time independent of their number
        self._before = [np.zeros(num_sources, np.int64)]
        for number, size in enumerate(np.diff(self._firsts).tolist()):
            before = self._before[-1].copy()
            before[self._sources[number]] += self._blends[number].counts(size)
            self._before.append(before)

    def locate(self, n: int) -> BlendPosition:
        """Returns the position of sample n, counted from 0; O(log phases)."""
        phase = bisect.bisect_right(self._firsts, n) - 1
        position = self._blends[phase].locate(n - self._firsts[phase])
        source = int(self._sources[phase][position.source])
        return BlendPosition(source, int(self._before[phase][source]) + position.number)

    def locate_all(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Locates many samples: returns [n] sources and [n] numbers, `locate` of each of the [n] numbers."""
        phases = np.searchsorted(self._firsts, numbers, side="right") - 1
        sources, counts = np.empty_like(numbers), np.empty_like(numbers)
        for phase in np.unique(phases).tolist():
            in_phase = phases == phase
            turns, dealt = self._blends[phase].locate_all(numbers[in_phase] - self._firsts[phase])
            sources[in_phase] = self._sources[phase][turns]
            counts[in_phase] = self._before[phase][sources[in_phase]] + dealt
        return sources, counts


def _one_period(parts: Sequence[int]) -> NDArray[np.int32]:
    """Returns the source of each turn, [sum(parts)] int32."""
    period, slack = sum(parts), max(1, 2 * len(parts) - 2)
    chosen = np.zeros(period, np.int32)
    counts = [0] * len(parts)
    waiting = [(_ceiling(period, part * slack), source) for source, part in enumerate(parts)]  # (first turn, source)
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []  # (turn at which the share falls due, source)
    for turn in range(1, period + 1):
        while waiting and waiting[0][0] <= turn:
            _, source = heapq.heappop(waiting)
            # whole numbers, since with floats rounding would order two sources that fall due together
            due = period * ((counts[source] + 1) * slack - 1) // (parts[source] * slack)
            heapq.heappush(ready, (due, source))
        _, source = heapq.heappop(ready)
        chosen[turn - 1] = source
        counts[source] += 1
        heapq.heappush(waiting, (_ceiling(period * (counts[source] * slack + 1), parts[source] * slack), source))
    return chosen


def _ceiling(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@dataclass(frozen=True)
class SamplePosition:
    """Position of a sample in its source."""

    source: int
    epoch: int
    """Number of earlier epochs of the source."""
    index: int
    """Index of the sample in the source, below its size."""


class SamplesOfEpoch(NamedTuple):
    """The samples of a request that come from one epoch of one source."""

    source: int
    epoch: int
    positions: NDArray[np.int64]
    """Positions of the samples in the request, [n]."""
    indices: NDArray[np.int64]
    """Indices of the samples in the source, [n]."""


class SampleOrder:
    """The endless sequence of training samples over weighted sources."""

    def __init__(self, seed: int, dealer: Blend | BlendPhases, sizes: Sequence[int]) -> None:
        self._seed, self._dealer = seed, dealer
        self.sizes = tuple(sizes)
        """Number of samples per epoch of each source."""

    def locate(self, g: int) -> SamplePosition:
        """Returns the position of sample g of the run, counted from 0: a pure function of (seed, g), in O(1).

        Every epoch of a source visits each of its samples once, in an order of its own.
        """
        source, number = self._dealer.locate(g)
        epoch, turn = divmod(number, self.sizes[source])
        key = key_of(self._seed, source, epoch)
        return SamplePosition(source, epoch, permuted(turn, self.sizes[source], key))

    def locate_all(self, numbers: NDArray[np.int64]) -> Iterator[SamplesOfEpoch]:
        """Yields the positions of many samples, one item per source and epoch; 100 times faster than `locate`."""
        sources, counts = self._dealer.locate_all(numbers)
        for source in np.unique(sources).tolist():
            positions = np.flatnonzero(sources == source)
            epochs, turns = np.divmod(counts[positions], self.sizes[source])
            for epoch in np.unique(epochs).tolist():
                in_epoch = epochs == epoch
                key = key_of(self._seed, source, epoch)
                indices = all_permuted(turns[in_epoch], self.sizes[source], key)
                yield SamplesOfEpoch(source, epoch, positions[in_epoch], indices)


def slots(microbatch: int, dp_rank: int, dp_size: int, micro_batch_size: int) -> range:
    """Returns the positions in the global batch that a data-parallel rank reads for a microbatch."""
    start = (microbatch * dp_size + dp_rank) * micro_batch_size
    return range(start, start + micro_batch_size)
