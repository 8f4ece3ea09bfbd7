"""Counts the all-reduces of a piece of code on a rank, and its kernels over large tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def counted_all_reduces() -> Iterator[Callable[[Callable[[], Any]], int]]:
    """Yields a function that runs an action and returns how many all-reduces it made; they are made as usual."""
    original, calls = dist.all_reduce, []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return original(*arguments, **options)

    def count(action: Callable[[], Any]) -> int:
        before = len(calls)
        action()
        return len(calls) - before

    dist.all_reduce = counted
    try:
        yield count
    finally:
        dist.all_reduce = original


class Kernels(TorchDispatchMode):
    """Names of the operations that read or write at least some number of elements; views and allocations are none."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.names: list[str] = []
        self._num_elements = num_elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        sizes = [each.numel() for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
        is_kernel = not (func.is_view or "empty" in name or "::" in name)
        if is_kernel and max(sizes, default=0) >= self._num_elements:
            self.names.append(name)
        return result
