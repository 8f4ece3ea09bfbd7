"""Random tokens, for benchmarks and for trying a layout without a corpus."""

import numpy as np
from numpy.typing import NDArray

from mtrain.core.batch.order import SamplePosition, key_of, mix
from mtrain.core.batch.sample import Sample, shifted

_TRAIN, _HELD_OUT = 0, 1


class MockSamples:
    """Endless samples of uniformly random tokens below `vocab_size`: a pure function of (seed, g)."""

    def __init__(self, seed: int, seq_length: int, vocab_size: int, held_out: bool = False) -> None:
        self._seed, self._seq_length, self._vocab_size = seed, seq_length, vocab_size
        self._part = _HELD_OUT if held_out else _TRAIN
        self.earlier_fingerprints: tuple[str, ...] = ()
        self.fingerprint = f"mock-{key_of(seed, seq_length, vocab_size, self._part):016x}"

    def sample(self, g: int) -> Sample:
        # part of the key, so that validation never sees a training sample
        key = np.uint64(key_of(self._seed, self._part, g))
        words = mix(np.arange(self._seq_length + 1, dtype=np.uint64) ^ key)
        ids = (words % np.uint64(self._vocab_size)).astype(np.int64)
        return shifted(ids, np.ones(self._seq_length))

    def widths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [n]: positions of samples, all equal."""
        return np.full(len(numbers), self._seq_length, np.int64)

    def locate(self, g: int) -> SamplePosition:
        """Says where sample g lies; every sample is new."""
        return SamplePosition(source=0, epoch=0, index=g)

    def next_epoch(self, g: int) -> None: ...

    @property
    def named_sizes(self) -> tuple[tuple[str, int | None], ...]:
        return (("mock", None),)
