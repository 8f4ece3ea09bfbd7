"""Checks of a teacher's cached log-probabilities, where extras bring them along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TOP_K_IDS = "topk_ids"
"""Name of the extra with the teacher's most likely tokens."""
TOP_K_LOGPROBS = "topk_logprobs"
"""Name of the extra with their log-probabilities, in the same order."""

_MOST_MASS = 1.01
"""Largest sum of the probabilities of a token: a teacher of 8 bits precision is off by less."""
_ROWS_AT_A_TIME = 2**16


class TopKFault(NamedTuple):
    """The first token whose numbers cannot be those of a teacher."""

    row: int
    why: str


def top_k_fault(
    numbers: NDArray[np.float32], names: Sequence[str], is_counted: NDArray[np.bool_], vocab_size: int
) -> TopKFault | None:
    """Says what is wrong with extras of the names above; returns None where nothing is, or where there are none.

    Args:
        numbers: [tokens, columns] finite numbers.
        names: Names of the columns, as `mtrain.config.extras.columns` gives them.
        is_counted: [tokens]: whether some loss uses the token. Where none does, any token ids may stand.
        vocab_size: Size of the model's vocabulary.
    """
    ids, logprobs = ([place for place, each in enumerate(names) if each.startswith(f"{key}[")] for key in _KEYS)
    if not ids and not logprobs:
        return None
    for start in range(0, len(numbers), _ROWS_AT_A_TIME):  # a cache may be larger than memory
        rows = slice(start, start + _ROWS_AT_A_TIME)
        for is_bad, why in _judged(numbers[rows, ids], numbers[rows, logprobs], is_counted[rows], vocab_size):
            if is_bad.any():
                return TopKFault(start + int(np.argmax(is_bad)), why)
    return None


_KEYS = (TOP_K_IDS, TOP_K_LOGPROBS)


def _judged(
    ids: NDArray[np.float32], logprobs: NDArray[np.float32], is_counted: NDArray[np.bool_], vocab_size: int
) -> Iterator[tuple[NDArray[np.bool_], str]]:
    is_id = (ids == np.floor(ids)) & (ids >= 0) & (ids < vocab_size)
    yield (
        ~is_id.all(axis=1),
        f"{TOP_K_IDS} that are no token ids: whole numbers from 0 to {vocab_size - 1} are needed (model.vocab_size="
        f"{vocab_size}), also where the mask is 0; take a teacher with the model's own tokenizer",
    )
    ordered = np.sort(ids, axis=1)
    yield (
        (ordered[:, 1:] == ordered[:, :-1]).any(axis=1) & is_counted,
        f"the same token twice in {TOP_K_IDS}; give each token once, and where the teacher has fewer, any others with "
        f"{TOP_K_LOGPROBS} of -10000",
    )
    mass = np.exp(np.minimum(logprobs, 1.0), dtype=np.float64).sum(axis=1)
    yield (
        (mass > _MOST_MASS) & is_counted,
        f"{TOP_K_LOGPROBS} whose probabilities add up to more than 1; give logarithms (to base e) of the softmax over "
        "the teacher's whole vocabulary, not logits",
    )
