"""A finetuning sample as token ids, before it becomes a row: encoders make it and the cache keeps it."""

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
    """[n] at least 0: weight of predicting ids[t]; 0 for prompts and headers. The first is not used, as nothing comes
    before it."""
    weight: float = 1.0
    """Weight of the whole sequence, at least 0."""
    extras: NDArray[np.float32] | None = None
    """[n, extras]: numbers that data.extras names, of each token; the first row is not used. None where it names
    none."""


def with_label(sample: TokenizedSample, end: int) -> TokenizedSample:
    """Cuts a sequence to `end` tokens and puts the label, which follows the whole sequence, in the place of the last
    one."""

    def cut(values: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([values[: end - 1], values[-1:]])

    extras = None if sample.extras is None else cut(sample.extras)
    return replace(sample, ids=cut(sample.ids), loss_weights=cut(sample.loss_weights), extras=extras)


class SampleEncoder(Protocol):
    """Encoder of the records of a finetuning source."""

    fingerprint: str
    """Name of the encoding: changes when tokenizer, template or an option would give other ids or weights for the same
    record, or would refuse it."""

    def encode(self, record: dict[str, Any]) -> TokenizedSample | tuple[TokenizedSample, ...]:
        """Encodes a record as one sequence, or as several that are compared. A pure function of the record; may run in
        worker processes.

        Raises:
            DataError: The record is no sample of this form; says what is wrong, not where it lies.
        """
