"""Waits and copies of the host, by step and line of code."""

from __future__ import annotations

import sys
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.paths import ROOT


class Kind(StrEnum):
    """Kind of a noted event."""

    READ = "read"
    """The host waits until a kernel is done: a value is fetched, or a size that depends on values."""
    WAITING_COPY = "waiting copy"
    """The host waits for a copy to the device: from memory that is not pinned, or without non_blocking."""
    COPY = "copy"
    """A copy between the devices runs while the host goes on."""
    WAIT = "wait"
    """The host waits for a stream or an event."""
    COLLECTIVE = "collective"


_OURS = str(ROOT / "mtrain")
_SHOWN = (_OURS, "/megatron/core/")
_found: dict[int, Counter[tuple[str, str]]] = {}
_step = [0]


def begin_step(step: int) -> None:
    """Assigns later events to this step; events before the first step belong to 0."""
    _step[0] = step


def note(kind: Kind, what: str) -> None:
    """Counts one event at the line that caused it."""
    _found.setdefault(_step[0], Counter())[kind.value, f"{_line()} {what}"] += 1


def found() -> dict[int, list[tuple[str, str, int]]]:
    """Returns step -> (kind, place, count)."""
    return {step: [(kind, where, count) for (kind, where), count in each.items()] for step, each in _found.items()}


def _line() -> str:
    """Returns the innermost line of ours or of megatron-core's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_OURS):
            return f"{Path(path).relative_to(ROOT)}:{frame.f_lineno}"
        if "/megatron/core/" in path:
            return f"megatron/core/{path.rpartition('/megatron/core/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"
