"""Whether some of a source's sequences have anything to learn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mtrain.data.cache.entry import TokenCache
from mtrain.data.samples.too_long import Pieces, num_trained


def why_nothing(cache: TokenCache, pieces: Pieces, is_judged: bool = False) -> str | None:
    """Why no piece has a token to learn, with counts; None where one has.

    A record without a token to learn is no sample, so a piece can only lose all of them to its record's weight or to a
    cut.

    Args:
        cache: Holds the samples.
        pieces: What is trained of them.
        is_judged: Whether a label that counts stands after the last token, which no cut takes away.
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
