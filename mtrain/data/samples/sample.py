"""One training sample before it becomes a row, or a part of a row, of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mtrain.loss.preference.member import GroupMember


@dataclass(frozen=True)
class Sample:
    """One sequence for the loss: n positions of text, without padding, and what each of them has to predict."""

    tokens: NDArray[np.int64]
    """[n]; n may be 0."""
    labels: NDArray[np.int64]
    """[n], shifted: the token to predict at each position; 0 where there is none."""
    mask: NDArray[np.float64]
    """[n] at least 0: what the token to predict counts; 0 for prompts."""
    weight: float = 1.0
    """What the whole sample counts, at least 0."""
    document_starts: NDArray[np.int32] | None = None
    """[n]: index in the sample at which each token's document begins; None where the sample is one document."""
    extras: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Name -> [width]: what a loss function reads beside the weights, such as advantages; shifted as labels are."""
    source: int | None = None
    """Number in data.train, where it comes from a blend."""
    member: GroupMember | None = None
    """Its part in a group that a preference loss compares; None where sequences are judged by themselves."""

    def as_member(self, member: GroupMember) -> Sample:
        """The sample in a group."""
        return replace(self, member=member)

    @property
    def width(self) -> int:
        """Positions that it takes in a row: one, of padding, where it has no text."""
        # what a sequence adds to a denominator lies at its first position, so each needs one
        return max(1, len(self.tokens))


class SampleSource(Protocol):
    """A corpus cut into samples."""

    fingerprint: str
    """Changes when the corpus or the way it is cut changes."""

    def __len__(self) -> int:
        """Samples in an epoch; the same for every epoch."""

    def sample(self, epoch: int, index: int) -> Sample:
        """A pure function of its arguments, safe to call from several threads.

        Raises:
            DataError: the corpus is damaged at this place or does not fit the model.
        """

    def why_nothing(self) -> str | None:
        """Why none of its samples has anything to learn, with counts; None where one has."""

    def widths(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n]: `sample(epoch, index).width` of many, the same in every epoch; without reading them, as packing asks
        for all samples of a step on every rank."""


def shifted(
    ids: NDArray[np.int64],
    label_mask: NDArray[np.float64],
    weight: float = 1.0,
    document_starts: NDArray[np.int32] | None = None,
    extras: Mapping[str, NDArray[np.float32] | float] | None = None,
) -> Sample:
    """A sample from running text: position t holds ids[t] and predicts ids[t + 1].

    Args:
        ids: [n], at least one.
        label_mask: [n - 1]: what predicting ids[1:] counts.
        weight: Of the sample.
        document_starts: [n - 1].
        extras: Of each predicted token, [n - 1], or of the whole sample.
    """
    width = max(1, len(ids) - 1)
    return Sample(
        tokens=ids[:-1],
        labels=ids[1:],
        mask=label_mask,
        weight=weight,
        document_starts=document_starts,
        extras={name: _spread(extra, width) for name, extra in (extras or {}).items()},
    )


def _spread(extra: NDArray[np.float32] | float, width: int) -> NDArray[np.float32]:
    """[width]: one number a position, 0 where there is none."""
    if isinstance(extra, float):
        return np.full(width, extra, np.float32)
    return extra if len(extra) else np.zeros(width, np.float32)
