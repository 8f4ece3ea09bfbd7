"""Ranks for tests: the pool of `mtrain verify`, with what tests import loaded once.

Functions for `Pool.run` live in modules that are not test files, so that ranks can import them.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mtrain.plan.layout import Layout
from mtrain.verify.core import ranks
from mtrain.verify.core.ranks import RankFailedError as RankFailed
from tests import warm

__all__ = ["Pool", "RankFailed"]


FUNCTIONS = ("tests.parity.ranks", "tests.mcore.state.checkpoint_ranks", "mtrain.verify.core.exact")
"""What most ranks call, which each would import anew: a hundred ranks, two to five seconds."""
LAZY = ("numpy.ma", "rich._emoji_codes", "torch.utils.serialization.config")
"""What libraries import as a run uses them."""


REFERENCES = ("exact_run", "exact_steps")
"""Of mtrain/verify/core/exact.py: pure functions of their arguments, which planted faults do not touch."""
NUM_KEPT = 100


class Pool(ranks.Pool):
    """Ranks on gloo. What the reference of `mtrain verify` says of the same steps is computed here, once."""

    def __init__(self) -> None:
        before = ["pytest", "tests.pool", "mtrain.verify.resume.worker", *FUNCTIONS, *LAZY, *warm.PRELOADED]
        # strict_warnings last: not of what the others import
        super().__init__(preloaded=[*before, "tests.base.strict_warnings"], timeout_s=600)
        self._references: OrderedDict[str, list[Any]] = OrderedDict()

    def run(self, function: Callable[..., Any], layout: Layout, *arguments: Any, seed: int = 1234) -> list[Any]:
        """As the pool of the program."""
        if function.__name__ not in REFERENCES:
            return super().run(function, layout, *arguments, seed=seed)
        key = hashlib.sha256(pickle.dumps((function.__name__, str(layout), arguments, seed))).hexdigest()
        if key not in self._references:
            import torch

            here = SimpleNamespace(device=torch.device("cpu"))  # all that it needs to know of its groups: no rank
            self._references[key] = [function(here, *arguments)]
        self._references.move_to_end(key)
        while len(self._references) > NUM_KEPT:
            self._references.popitem(last=False)
        return self._references[key]
