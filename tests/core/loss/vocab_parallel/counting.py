"""Counts the all-reduces of a piece of code on a rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


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
