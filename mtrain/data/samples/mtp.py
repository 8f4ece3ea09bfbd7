"""Inputs and labels of multi-token prediction, whose depths look further ahead than the next token.

Depth k of a position gets the token k positions ahead and predicts the token after that, both inside the document. Rows
are whole here; the later cut for context parallelism needs no neighbour any more.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mtrain.data.samples.sample import Sample

Value = TypeVar("Value", np.int64, np.float64, np.bool_)


def mtp_sample(sample: Sample, document_starts: NDArray[np.int32], depth: int) -> Sample:
    """Moves tokens, labels and mask of a whole row as `moved` does."""
    return Sample(
        tokens=moved(sample.tokens, document_starts, depth),
        labels=moved(sample.labels, document_starts, depth),
        mask=moved(sample.mask, document_starts, depth),
        weight=sample.weight,
    )


def moved(values: NDArray[Value], document_starts: NDArray[np.int32], depth: int) -> NDArray[Value]:
    """Returns the values `depth` positions further in the same document; 0 where document or row end before.

    Args:
        values: [seq] values of a whole row.
        document_starts: [seq]: index in the row of the first token of each token's document.
        depth: Depth of multi-token prediction, at least 1.
    """
    found = np.zeros_like(values)
    # the same start is the same document: nothing is predicted across an edge
    found[:-depth] = np.where(document_starts[depth:] == document_starts[:-depth], values[depth:], values.dtype.type(0))
    return found
