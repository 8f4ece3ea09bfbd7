"""Work in threads; what runs beside training runs in threads that nothing waits for at the end of the process."""

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
    """Runs the action in a thread of its own.

    A thread that a dead disk holds for ever keeps neither the program nor a later action from going on; an executor's
    would, as Python waits for those.
    """
    from concurrent.futures import Future  # with logging; the command line imports this module before all others

    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = action()
        except BaseException as fault:  # whatever it is, it belongs to the one who asks for the result
            future.set_exception(fault)
        else:
            future.set_result(result)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)  # dropped with its last reference, which is its own
    thread.start()
    return future


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def is_anything_running() -> bool:
    """Whether a thread of `started` is still at work; a program that ends must then leave by os._exit.

    The interpreter's own end would wait for the pools that such a thread has opened, and abort the process where the
    thread comes back from an operation of torch.
    """
    return any(thread.is_alive() for thread in list(_threads))


def mapped(action: Callable[[Item], Result], items: Iterable[Item], num_threads: int) -> list[Result]:
    """The action on every item, in order.

    One thread is the caller's own: Python waits for those of a pool when the program ends, so work that a stop may
    abandon must not start any.
    """
    if num_threads <= 1:
        return [action(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(action, items))
