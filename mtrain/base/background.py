"""Daemon threads for work in parallel to training; the process does not wait for them when it ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

Item = TypeVar("Item")
Result = TypeVar("Result")


def started(action: Callable[[], Result], name: str) -> Future[Result]:
    """Runs an action in a new daemon thread and returns its future.

    Unlike a thread of an executor, a thread that hangs on a dead disk delays neither the end of the program nor later
    actions.
    """
    from concurrent.futures import Future  # imports logging; the command line imports this module before all others

    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = action()
        except BaseException as fault:  # raised again for the caller who asks for the result
            future.set_exception(fault)
        else:
            future.set_result(result)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)  # a running thread holds a reference to itself, so it stays in this weak set
    thread.start()
    return future


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def is_anything_running() -> bool:
    """Says whether a thread of `started` is still running; the program must then end with os._exit.

    Otherwise the interpreter would wait for pools that the thread opened, and abort when the thread returns from torch.
    """
    return any(thread.is_alive() for thread in list(_threads))


def mapped(action: Callable[[Item], Result], items: Iterable[Item], num_threads: int) -> list[Result]:
    """Applies the action to every item and returns the results in order.

    With one thread the caller does the work. Python waits for thread pools when the program ends, so work that a stop
    may abandon must use one thread.
    """
    if num_threads <= 1:
        return [action(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(action, items))
