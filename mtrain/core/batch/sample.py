"""One training sample, as token ids and as a row, or a part of a row, of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mtrain.core.loss.preference.member import GroupMember


@dataclass(frozen=True)
class TokenizedSample:
    """One sequence for the loss, whole and without padding."""

    ids: NDArray[np.int32]
    """[n]: token ids, at least one."""
    loss_weights: NDArray[np.float32]
    """[n] at least 0: weight of predicting ids[t]; 0 for prompts and headers. The first is not used."""
    weight: float = 1.0
    """Weight of the whole sequence, at least 0."""
    extras: NDArray[np.float32] | None = None
    """[n, extras]: numbers of each token that data.extras names; the first row is not used. None if it names none."""


def with_label(sample: TokenizedSample, end: int) -> TokenizedSample:
    """Cuts a sequence to `end` tokens, the last of which becomes the label that followed the whole sequence."""

    def cut(values: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([values[: end - 1], values[-1:]])

    extras = None if sample.extras is None else cut(sample.extras)
    return replace(sample, ids=cut(sample.ids), loss_weights=cut(sample.loss_weights), extras=extras)


class SampleEncoder(Protocol):
    """Encoder of the records of a finetuning source."""

    fingerprint: str
    """Name of the encoding; changes when tokenizer, template or an option would encode or refuse a record
    differently."""

    def encode(self, record: dict[str, Any]) -> TokenizedSample | tuple[TokenizedSample, ...]:
        """Encodes a record as one sequence, or as several that are compared. A pure function; may run in worker
        processes.

        Raises:
            DataError: The record is not a valid sample of this format; the message says what is wrong, not where.
        """


@dataclass(frozen=True)
class Sample:
    """One sequence for the loss: n positions of text, without padding, and their labels."""

    tokens: NDArray[np.int64]
    """[n] int64: token ids; n may be 0."""
    labels: NDArray[np.int64]
    """[n], shifted: the token to predict at each position; 0 where there is none."""
    mask: NDArray[np.float64]
    """[n] float64: weight of the token to predict, at least 0; 0 for prompts."""
    weight: float = 1.0
    """Weight of the whole sample, at least 0."""
    document_starts: NDArray[np.int32] | None = None
    """[n]: index in the sample at which each token's document begins; None where the sample is one document."""
    extras: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Name -> [width]: values that a loss function reads in addition to the weights, such as advantages; shifted as
    labels are."""
    choices: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)
    """Name -> [width, layers, k]: choices that layers replay for each input token (choices.py); -1 where the layer
    chooses."""
    source: int | None = None
    """Number of the source in data.train; None outside a blend."""
    member: GroupMember | None = None
    """Part of the sample in a group that a preference loss compares; None if sequences are judged separately."""

    def as_member(self, member: GroupMember) -> Sample:
        """Returns the sample as a member of a group."""
        return replace(self, member=member)

    @property
    def width(self) -> int:
        """Counts the positions that the sample takes in a row: one, of padding, if it has no text."""
        # a sequence's share of a denominator lies at its first position
        return max(1, len(self.tokens))


class SampleSource(Protocol):
    """A corpus cut into samples."""

    fingerprint: str
    """Name of the samples; changes when the corpus or the way it is cut changes."""

    def __len__(self) -> int:
        """Counts the samples in an epoch; the same for every epoch."""

    def sample(self, epoch: int, index: int) -> Sample:
        """Returns a sample of an epoch: a pure function of its arguments, safe to call from several threads.

        Raises:
            DataError: The corpus is damaged at this place or does not fit the model.
        """

    def why_nothing(self) -> str | None:
        """Explains, with counts, why no sample has anything to learn; returns None if one has."""

    def widths(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [n]: `sample(epoch, index).width` of many samples, the same in every epoch, without reading them."""


def shifted(
    ids: NDArray[np.int64],
    label_mask: NDArray[np.float64],
    weight: float = 1.0,
    document_starts: NDArray[np.int32] | None = None,
    extras: Mapping[str, NDArray[np.float32] | float] | None = None,
) -> Sample:
    """Builds a sample from running text: position t holds ids[t] and predicts ids[t + 1].

    `label_mask` has the weight of predicting each of ids[1:], `document_starts` the first token of each one's document,
    None for one document; extras are values of each predicted token, or one number for the whole sample.
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
    if isinstance(extra, float):
        return np.full(width, extra, np.float32)
    return extra if len(extra) else np.zeros(width, np.float32)
