"""Daemon threads for work next to training; the end of the process waits for none of them."""

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
    """Runs an action in its own daemon thread.

    A thread that hangs on a dead disk delays neither the end of the program nor a later action, as a thread of an
    executor would.
    """
    from concurrent.futures import Future  # imports logging; the command line imports this module before all others

    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = action()
        except BaseException as fault:  # whatever it is, it belongs to the caller who asks for the result
            future.set_exception(fault)
        else:
            future.set_result(result)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)  # dropped with its last reference, which the thread itself holds while it runs
    thread.start()
    return future


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def is_anything_running() -> bool:
    """Says whether a thread of `started` is still at work; the program must then end with os._exit.

    Otherwise the interpreter would wait for pools that the thread has opened, and abort when it returns from torch.
    """
    return any(thread.is_alive() for thread in list(_threads))


def mapped(action: Callable[[Item], Result], items: Iterable[Item], num_threads: int) -> list[Result]:
    """Applies the action to every item and returns the results in order.

    With one thread the caller does the work. Python waits for pools when the program ends, so work that a stop may
    abandon must not start one.
    """
    if num_threads <= 1:
        return [action(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(action, items))
