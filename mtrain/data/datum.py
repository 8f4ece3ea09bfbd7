"""What a user's program hands over: sequences with what their tokens count, and how they become microbatches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.data.samples.sample import Sample, shifted


@dataclass(frozen=True)
class Datum:
    """One sequence for the loss: a text, a question with its answer, a rollout."""

    input_ids: Sequence[int]
    """Token ids, at least one and at most data.seq_length + 1: every token but the last is read, every token but the
    first is predicted."""
    weights: Sequence[float] | None = None
    """What predicting each token counts, one a token, at least 0; 0 for a prompt. The first is not used, as nothing
    comes before it. None: every token counts 1."""
    weight: float = 1.0
    """What the whole sequence counts, at least 0."""


def sample_of(datum: Datum, name: str, config: Config) -> Sample:
    """A datum as a sample.

    Args:
        datum: What the user gave.
        name: For messages, such as "sample 3".
        config: Positions of a sample, size of the vocabulary.

    Raises:
        DataError: It is empty, too long, has ids beyond the vocabulary, or weights that cannot be.
    """
    length, size = config.data.seq_length, config.model.vocab_size
    ids = np.asarray(datum.input_ids, dtype=np.int64)
    if ids.ndim != 1 or not 1 <= len(ids) <= length + 1:
        raise _fault(
            f"{name} has input_ids of shape {list(ids.shape)}, but needs one row of 1 to {length + 1} tokens "
            f"(data.seq_length={length}, and one that is only predicted); cut it, or raise data.seq_length"
        )
    if ids.min() < 0 or ids.max() >= size:
        raise _fault(
            f"{name} has token ids from {ids.min()} to {ids.max()}, but model.vocab_size={size} allows "
            f"0 to {size - 1}; use the model's own tokenizer"
        )
    weights = np.ones(len(ids)) if datum.weights is None else np.asarray(datum.weights, dtype=np.float64)
    if weights.shape != ids.shape:
        raise _fault(
            f"{name} has {len(ids)} input_ids, but weights of shape {list(weights.shape)}; give one weight a token"
        )
    if not (np.isfinite(weights).all() and weights.min() >= 0 and math.isfinite(datum.weight) and datum.weight >= 0):
        raise _fault(f"{name} has a weight that is negative or not finite; weights must be finite and at least 0")
    # position t predicts token t + 1, so the weight of the first token has no position
    return shifted(ids, weights[1:], datum.weight)


def _fault(message: str) -> DataError:
    """Of a batch that is the same on all ranks."""
    error = DataError(message)
    # every rank has seen the same samples, so all raise it: no collective has to spread it
    error.on_every_rank = True
    return error
