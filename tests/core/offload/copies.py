"""Copies of activations between the device and the host, counted while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mtrain.core.layers.offload import activations


class Copies:
    """Counts the copies of this process inside its `with` block."""

    def __init__(self) -> None:
        self.gone: list[int] = []
        """Bytes of each block of memory that went to the host."""
        self.back: list[int] = []
        """Bytes of each block of memory that came back."""
        there: Any = activations
        self._there = there
        self._original = there.copy_to_host, there.copy_from_host

    def __enter__(self) -> Copies:
        gone, back = self._original
        self._there.copy_to_host = _noting(self.gone, lambda values, pieces: values, gone)
        self._there.copy_from_host = _noting(self.back, lambda pieces, values: values, back)
        return self

    def __exit__(self, *error: object) -> None:
        self._there.copy_to_host, self._there.copy_from_host = self._original


def _noting(sizes: list[int], values_of: Callable[[Any, Any], Tensor], copy: Callable[[Any, Any], None]) -> Any:
    def noted(source: Any, target: Any) -> None:
        sizes.append(values_of(source, target).nbytes)
        copy(source, target)

    return noted
