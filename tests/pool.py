"""Ranks for tests: the pool of `mtrain verify`, with the modules that tests import preloaded.

Functions for `Pool.run` are in modules that are not test files, so that ranks can import them.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mtrain.arch.layout import Layout
from mtrain.verify.core import ranks
from mtrain.verify.core.ranks import RankFailedError as RankFailed
from tests import warm

__all__ = ["Pool", "RankFailed"]


FUNCTIONS = ("tests.parity.ranks", "tests.core.state.checkpoint_ranks", "mtrain.verify.core.exact")
"""Modules that most ranks call, and would otherwise import each: a hundred ranks, two to five seconds."""
LAZY = (
    "numpy.ma",
    "rich._emoji_codes",
    "torch.utils.serialization.config",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
)
"""Modules that libraries import during a run."""


REFERENCES = ("exact_run", "exact_steps")
"""Functions of mtrain/verify/core/exact.py that are pure in their arguments, and that planted faults do not touch."""
NUM_KEPT = 100


class Pool(ranks.Pool):
    """Pool of ranks on gloo. Results of the reference of `mtrain verify` for the same steps are computed here, once."""

    def __init__(self) -> None:
        before = ["pytest", "tests.pool", "mtrain.verify.resume.worker", *FUNCTIONS, *LAZY, *warm.PRELOADED]
        # strict_warnings last: it must not apply to the others' imports
        super().__init__(preloaded=[*before, "tests.base.strict_warnings"], timeout_s=600)
        self._references: OrderedDict[str, list[Any]] = OrderedDict()
        # checks run two layouts at a time, but the reference of images puts weights into one shared module
        self._lock = threading.Lock()

    def run(self, function: Callable[..., Any], layout: Layout, *arguments: Any, seed: int = 1234) -> list[Any]:
        """Runs the function on every rank, as the program's pool does; references run here, and are cached."""
        if function.__name__ not in REFERENCES:
            return super().run(function, layout, *arguments, seed=seed)
        key = hashlib.sha256(pickle.dumps((function.__name__, str(layout), arguments, seed))).hexdigest()
        with self._lock:
            if key not in self._references:
                import torch

                here = SimpleNamespace(device=torch.device("cpu"))  # all that it reads of its groups: no rank
                self._references[key] = [function(here, *arguments)]
            self._references.move_to_end(key)
            while len(self._references) > NUM_KEPT:
                self._references.popitem(last=False)
            return self._references[key]
