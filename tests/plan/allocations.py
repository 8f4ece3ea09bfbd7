"""Counts the bytes of live tensors, storage by storage while operations run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages:
    """Bytes of storages, each counted once until nothing holds it any more."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        """Bytes that are alive now, and at most so far."""
        self._known: dict[int, weakref.ref[Any]] = {}

    def note(self, tensor: Tensor, is_new: bool = True) -> None:
        """Adds a storage; one that existed before counts nothing."""
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._known:
            return
        size = storage.nbytes() if is_new else 0

        def freed(_: object) -> None:
            self.now -= size
            del self._known[place]

        self._known[place] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


class Allocations(TorchDispatchMode):
    """Counts every storage that an operation makes inside the `with` block, until nothing holds it any more.

    Views share a storage, which counts once, and results in storages that were there before count nothing. What an
    operation allocates and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages = LiveStorages()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._storages.note(tensor, is_new=False)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._storages.note(tensor, is_new=True)
        return result

    @property
    def peak(self) -> int:
        """Returns the most bytes at any one time."""
        return self._storages.peak


def _tensors(value: object) -> Iterator[Tensor]:
    return (each for each in tree_leaves(value) if isinstance(each, Tensor))
