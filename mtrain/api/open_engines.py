"""Engines that are open in this process, so that a program that lost one can close it."""

from __future__ import annotations

import weakref
from typing import Protocol


class Closable(Protocol):
    """Engine, of which only the end matters here."""

    def close(self) -> None:
        """Frees what is held; may be called twice."""


open_engines: weakref.WeakSet[Closable] = weakref.WeakSet()
"""Engines that hold what they have opened. An engine that nothing refers to any more gives it back by itself."""


def close_all() -> None:
    """Closes every engine of this process, as after a cell of a notebook that failed: a new one can then start.

    Frees models, process groups and threads. Where there are several ranks, all of them call it.
    """
    for engine in list(open_engines):
        engine.close()
