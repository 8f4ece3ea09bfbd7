"""Ranks for tests: the pool of `mtrain verify`, with what tests import loaded once.

Functions for `Pool.run` live in modules that are not test files, so that ranks can import them.
"""

from __future__ import annotations

from mtrain.verify.core import ranks
from mtrain.verify.core.ranks import RankFailedError as RankFailed
from tests import warm

__all__ = ["Pool", "RankFailed"]


FUNCTIONS = ("tests.parity.ranks", "tests.mcore.state.checkpoint_ranks", "mtrain.verify.core.exact")
"""What most ranks call, which each would import anew: a hundred ranks, two to five seconds."""
LAZY = ("numpy.ma", "rich._emoji_codes", "torch.utils.serialization.config")
"""What libraries import as a run uses them."""


class Pool(ranks.Pool):
    """Ranks on gloo."""

    def __init__(self) -> None:
        before = ["pytest", "tests.pool", "mtrain.verify.resume.worker", *FUNCTIONS, *LAZY, *warm.PRELOADED]
        # strict_warnings last: not of what the others import
        super().__init__(preloaded=[*before, "tests.base.strict_warnings"], timeout_s=600)
