"""One training sample before it becomes a row of a batch."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """A row of seq_length positions with what each of them has to predict; one sequence for the loss."""

    tokens: NDArray[np.int64]
    """[seq]; padded at the end."""
    labels: NDArray[np.int64]
    """[seq], shifted: the token to predict at each position; 0 where there is none."""
    mask: NDArray[np.float64]
    """[seq] at least 0: what the token to predict counts; 0 for padding and prompts."""
    weight: float = 1.0
    """What the whole sample counts, at least 0."""
    document_starts: NDArray[np.int32] | None = None
    """[seq]: index in the row at which each token's document begins; None where the row is one document."""
    num_padding: int = 0
    """Positions at the end that hold no text."""


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


def padded(
    ids: NDArray[np.int64],
    label_mask: NDArray[np.float64],
    seq_length: int,
    pad_id: int,
    weight: float = 1.0,
    document_starts: NDArray[np.int32] | None = None,
) -> Sample:
    """A sample from running text: position t holds ids[t] and predicts ids[t + 1].

    Args:
        ids: [n], 1 <= n <= seq_length + 1.
        label_mask: [n - 1]: what predicting ids[1:] counts.
        seq_length: Width of the row; what is missing is padded with weight 0.
        pad_id: Fills the tokens.
        weight: Of the sample.
        document_starts: [n - 1]; padding becomes a document of its own.
    """
    filled = len(ids) - 1
    missing = seq_length - filled
    starts = document_starts
    if starts is not None:
        # a document of its own: padding attends to no text
        starts = np.pad(starts, (0, missing), constant_values=filled).astype(np.int32)
    return Sample(
        tokens=np.pad(ids[:-1], (0, missing), constant_values=pad_id),
        labels=np.pad(ids[1:], (0, missing)),
        mask=np.pad(label_mask, (0, missing)),
        weight=weight,
        document_starts=starts,
        num_padding=missing,
    )
