"""One training sample, first as token ids, then as a row or a part of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mtrain.core.batch.images import SampleImages
from mtrain.core.loss.preference.member import GroupMember

HERE = Path()


@dataclass(frozen=True)
class EncodedImage:
    """Image of a sample, before it is cut into patches."""

    content: bytes
    """Content of an image file, such as PNG."""
    grid: tuple[int, int, int]
    """Frames, rows and columns, in patches."""
    file: str | None = None
    """Path of the file as the record gives it, relative to the folder of the data; None if the record holds the
    image."""
    state: Mapping[str, int] | None = None
    """State of the file on disk with this content; None if it cannot be trusted."""


@dataclass(frozen=True)
class TokenizedSample:
    """One sequence for the loss, whole and without padding."""

    ids: NDArray[np.int32]
    """[n]: token ids, at least one."""
    loss_weights: NDArray[np.float32]
    """[n], at least 0: weight of predicting ids[t]; 0 for prompts and headers. The first is ignored."""
    weight: float = 1.0
    """Weight of the whole sequence, at least 0."""
    extras: NDArray[np.float32] | None = None
    """[n, extras]: numbers of each token that data.extras names; the first row is ignored. None if it names none."""
    images: tuple[EncodedImage, ...] = ()
    """Images in the order of their tokens; `ids` holds all tokens of each image."""


def with_label(sample: TokenizedSample, end: int) -> TokenizedSample:
    """Cuts a sequence that ends with a label to `end` tokens, and keeps the label as the last of them."""

    def cut(values: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([values[: end - 1], values[-1:]])

    extras = None if sample.extras is None else cut(sample.extras)
    return replace(sample, ids=cut(sample.ids), loss_weights=cut(sample.loss_weights), extras=extras)


class SampleEncoder(Protocol):
    """Encodes the records of a finetuning source."""

    fingerprint: str
    """Identifies the encoding; changes when the tokenizer, the template or an option would encode or refuse a record
    differently."""

    def encode(self, record: dict[str, Any], folder: Path = HERE) -> TokenizedSample | tuple[TokenizedSample, ...]:
        """Encodes a record as one sequence, or as several sequences to compare. A pure function of the record and the
        files that it names, which may run in worker processes.

        Args:
            folder: Folder of the record's file, from which the record's own paths count.

        Raises:
            DataError: The record is not a valid sample of this format; the message says what is wrong, not where.
        """


@dataclass(frozen=True)
class Sample:
    """One sequence for the loss: n positions of text, without padding, and their labels."""

    tokens: NDArray[np.int64]
    """[n] int64: token ids; n may be 0."""
    labels: NDArray[np.int64]
    """[n], shifted: the token to predict at each position; 0 if none."""
    mask: NDArray[np.float64]
    """[n] float64: weight of the token to predict, at least 0; 0 for prompts."""
    weight: float = 1.0
    """Weight of the whole sample, at least 0."""
    document_starts: NDArray[np.int32] | None = None
    """[n]: index in the sample at which each token's document begins; None if the sample is one document."""
    extras: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Name -> [width]: values that a loss function reads in addition to the weights, such as advantages; shifted like
    the labels."""
    choices: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)
    """Name -> [width, layers, k]: choices that layers replay for each input token (choices.py); -1 where the layer
    chooses itself."""
    source: int | None = None
    """Index of the source in data.train; None outside a blend."""
    member: GroupMember | None = None
    """Membership in a group that a preference loss compares; None outside a group."""
    images: SampleImages | None = None
    """Images among the tokens; None for text alone."""

    def as_member(self, member: GroupMember) -> Sample:
        """Returns the sample as a member of a group."""
        return replace(self, member=member)

    @property
    def width(self) -> int:
        """Returns the number of positions in a row; a sample without text takes one position of padding."""
        # at least one, since the first position carries the share of the sequence in the denominator
        return max(1, len(self.tokens))


class SampleSource(Protocol):
    """A corpus cut into samples."""

    fingerprint: str
    """Identifies the samples; changes when the corpus or the way it is cut changes."""

    def __len__(self) -> int:
        """Returns the number of samples per epoch."""

    def sample(self, epoch: int, index: int) -> Sample:
        """Returns a sample of an epoch: a pure function of its arguments, safe to call from several threads.

        Raises:
            DataError: The corpus is damaged here or does not fit the model.
        """

    def why_nothing(self) -> str | None:
        """Explains, with counts, why no sample has anything to learn; None if some sample has."""

    def widths(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns `sample(epoch, index).width` of many samples, [n], without reading them; the same in every epoch."""


def shifted(
    ids: NDArray[np.int64],
    label_mask: NDArray[np.float64],
    weight: float = 1.0,
    document_starts: NDArray[np.int32] | None = None,
    extras: Mapping[str, NDArray[np.float32] | float] | None = None,
) -> Sample:
    """Builds a sample from running text: position t holds ids[t] and predicts ids[t + 1].

    Args:
        ids: Token ids, [n + 1].
        label_mask: Weight of predicting each of ids[1:], [n].
        document_starts: Index at which the document of each of ids[:-1] begins, [n]; None for one document.
        extras: Values for each predicted token, [n], or one number for the whole sample, by name.
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
