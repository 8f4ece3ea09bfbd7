"""Check whether any of a source's sequences has something to learn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mtrain.data.cache.entry import TokenCache
from mtrain.data.samples.too_long import Pieces, num_trained


def why_nothing(cache: TokenCache, pieces: Pieces, is_judged: bool = False) -> str | None:
    """Explains, with counts, why no piece has a token to learn; returns None where a piece has one.

    A record without a token to learn is no sample, so a piece can lose all of them only to its record's weight or to a
    cut.

    Args:
        cache: Cache of the samples.
        pieces: Parts of the samples that are trained.
        is_judged: Whether a label that counts follows the last token, which no cut takes away.
    """
    weighs: NDArray[np.bool_] = cache.weights[pieces.samples] != 0
    is_whole: NDArray[np.bool_] = pieces.sizes == cache.lengths[pieces.samples]
    if (weighs & (is_whole | is_judged)).any():
        return None
    cut = pieces.only(weighs)
    if len(cut) and num_trained(cache, cut).any():
        return None
    reasons = {"count 0 by their weight": len(pieces) - len(cut), "lose all that is in the loss by a cut": len(cut)}
    parts = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
    return f"of {len(pieces):,} sequences {' and '.join(parts)}"
