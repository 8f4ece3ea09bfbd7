"""Counts the bytes of live tensors, storage by storage while operations run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
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


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all storages that exist inside the `with` block beyond those before it, at their sizes of the
    moment: `fully_shard` resizes storages to gather parameters and to free them."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.peak = 0

    def __enter__(self) -> Any:
        for tensor in _alive():
            self._note(tensor, lambda storage: storage.nbytes())
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs, result)):
            self._note(tensor, lambda storage: 0)
        storages = ((known(), before) for known, before in list(self._known.values()))
        now = sum(storage.nbytes() - before for storage, before in storages if storage is not None)
        self.peak = max(self.peak, now)
        return result

    def _note(self, tensor: Tensor, size_before: Callable[[Any], int]) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self._known:
            self._known[place] = (weakref.ref(storage, lambda _: self._known.pop(place)), size_before(storage))


def alive_bytes() -> int:
    """Returns the bytes of the storages of all tensors that Python knows."""
    storages = (tensor.untyped_storage() for tensor in _alive())
    return sum({each._cdata: each.nbytes() for each in storages}.values())


def _alive() -> list[Tensor]:
    gc.collect()
    found = (each for each in gc.get_objects() if isinstance(each, Tensor))
    return [each for each in found if not isinstance(each, DTensor) and each.device.type == "cpu"]


def _tensors(value: object) -> Iterator[Tensor]:
    return (each for each in tree_leaves(value) if isinstance(each, Tensor))
