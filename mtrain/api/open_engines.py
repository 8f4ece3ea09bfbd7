"""Open engines of this process, so that a program that lost one can close it."""

from __future__ import annotations

import weakref
from typing import Protocol


class Closable(Protocol):
    """An engine's end."""

    def close(self) -> None:
        """Frees what is held; may be called twice."""


open_engines: weakref.WeakSet[Closable] = weakref.WeakSet()
"""Engines that hold resources; an engine that nothing refers to any more frees them itself."""


def close_all() -> None:
    """Closes every engine of this process, as after a failed cell of a notebook, so that a new one can start.

    Frees models, process groups and threads. If there are several ranks, all of them must call it.
    """
    for engine in list(open_engines):
        engine.close()
