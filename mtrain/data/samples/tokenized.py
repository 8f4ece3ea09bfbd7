"""A finetuning sample as token ids, before it becomes a row: what an encoder makes and the cache keeps."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenizedSample:
    """One sequence for the loss, whole and without padding."""

    ids: NDArray[np.int32]
    """[n]: token ids, at least one."""
    loss_weights: NDArray[np.float32]
    """[n] at least 0: what predicting ids[t] counts; 0 for prompts and headers. The first is not used, as nothing comes
    before it."""
    weight: float = 1.0
    """What the whole sequence counts, at least 0."""
    extras: NDArray[np.float32] | None = None
    """[n, extras]: of each token, the numbers that data.extras names; the first row is not used. None: it names
    none."""


def with_label(sample: TokenizedSample, end: int) -> TokenizedSample:
    """The first `end` tokens, the last of which gives its place to the label that stands behind the whole sequence."""

    def cut(values: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([values[: end - 1], values[-1:]])

    extras = None if sample.extras is None else cut(sample.extras)
    return replace(sample, ids=cut(sample.ids), loss_weights=cut(sample.loss_weights), extras=extras)


class SampleEncoder(Protocol):
    """Makes token ids of one record of a finetuning source."""

    fingerprint: str
    """Changes when tokenizer, template or an option would give other ids or weights for the same record, or
    would refuse it."""

    def encode(self, record: dict[str, Any]) -> TokenizedSample | tuple[TokenizedSample, ...]:
        """One sequence, or several that are compared. A pure function of the record; may run in worker processes.

        Raises:
            DataError: The record is no sample of this form; says what is wrong, not where it lies.
        """
