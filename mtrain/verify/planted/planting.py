"""Planting a fault: one function or attribute is replaced while a block runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Plant = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for one attribute, as long as the block runs."""
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def planted(name: str | None, plants: Mapping[str, Plant]) -> Iterator[None]:
    """Carries the fault on this rank while the block runs; None plants nothing."""
    if name is None:
        yield
        return
    with plants[name]():
        yield
