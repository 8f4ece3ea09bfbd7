"""Reads ahead in a thread."""

import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class Prefetch(Generic[Item], Iterator[Item]):
    """The items read(first), read(first + 1), ... without end, read up to `depth` ahead.

    A fault in the thread is raised by the `next` that would have returned its item, and by every later one. `close`, or
    the end of the `with` block, stops the thread and waits for it.
    """

    def __init__(self, read: Callable[[int], Item], first: int, depth: int) -> None:
        """Args:
        read: Makes the item of a number; called from one thread at a time.
        depth: Most items that wait; 0 reads in the caller, without a thread.
        """
        self._read, self._next = read, first
        self._fault: Exception | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if depth > 0:
            # a semaphore and an unbounded queue, not queue.Queue(depth): a put that blocks could not be woken by
            # `close`
            self._free = threading.Semaphore(depth)
            self._ready: queue.SimpleQueue[Item | _Fault] = queue.SimpleQueue()
            # daemon: if nobody closes it, a read that hangs must not keep the process from ending
            self._thread = threading.Thread(target=self._run, args=(first,), name="prefetch", daemon=True)
            self._thread.start()

    def __next__(self) -> Item:
        if self._is_closed:
            raise StopIteration
        if self._fault is not None:
            raise self._fault
        if self._thread is None:
            item = self._read(self._next)
            self._next += 1
            return item
        found = self._ready.get()
        if isinstance(found, _Fault):
            # kept: else a second `next` would wait for ever for a thread that has ended
            self._fault = found.error
            raise found.error
        self._free.release()
        return found

    def _run(self, number: int) -> None:
        while True:
            # before reading, so that no more than `depth` items exist, the one being made included
            self._free.acquire()
            if self._is_closed:
                return
            try:
                self._ready.put(self._read(number))
            except Exception as error:  # every kind: it is raised again in the caller, who cannot see this thread
                self._ready.put(_Fault(error))
                return
            number += 1

    def close(self) -> None:
        """Stops reading; waits for the item that is being read. Idempotent."""
        self._is_closed = True
        if self._thread is not None:
            self._free.release()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Fault:
    """Exception of the thread, in the place of an item."""

    def __init__(self, error: Exception) -> None:
        self.error = error
