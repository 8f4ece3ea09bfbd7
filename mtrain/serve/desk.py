"""Queues slow requests on the first rank: futures, their order and their results.

Calls of one model are numbered and run in that order, whatever the order of arrival. Clients send a call again if no
answer comes; it is still the same call.
"""

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mtrain.base.errors import DataError
from mtrain.serve.operations import Done, Failed, Operation, Refuse, Sample
from mtrain.serve.protocol import SentBatch

_MOST_WAITING = 10_000
"""Largest number of waiting requests."""
_MOST_RESULTS = 2 * _MOST_WAITING
"""Largest number of stored results; the oldest are dropped first. Enough for every result of a client that sends as
many requests as may wait."""
_MOST_BYTES = 2**32
"""Largest size of stored results, and of waiting batches and images."""
_PATIENCE_S = 60.0
"""Seconds to wait for a missing number after the latest call of a model."""


class FullError(Exception):
    """Too many requests are waiting; the client should retry later."""


@dataclass
class Request:
    id: str
    operation: Operation | None
    """None once the result exists, since a batch takes megabytes."""
    result: Done | Failed | None = None
    listeners: list[Callable[[], object]] = field(default_factory=list)
    """Called once the result exists."""

    @property
    def num_bytes(self) -> int:
        """Returns the size of the operation or of its result; 0 for kinds that are always small."""
        if isinstance(self.operation, SentBatch | Sample):
            return self.operation.num_bytes
        content = self.result.content if isinstance(self.result, Done) else None
        return len(content) if isinstance(content, bytes) else 0


@dataclass
class _Line:
    """Calls of one model in order of their numbers."""

    next: int = 1
    waiting: list[tuple[int, Request]] = field(default_factory=list)
    latest: float = 0.0
    """Arrival of the latest call."""


class Desk:
    """Accepts requests as they arrive, and starts each in its turn."""

    def __init__(self, begin: Callable[[Request], object], clock: Callable[[], float] = time.monotonic) -> None:
        """`begin` passes a request to the engine, which runs one at a time; `clock` returns seconds."""
        self._begin, self._clock = begin, clock
        self._lock = threading.Lock()
        self._requests: dict[str, Request] = {}
        self._finished: deque[Request] = deque()
        self._num_bytes = 0
        """Size of the stored results."""
        self._lines: dict[str, _Line] = {}
        self._numbers = itertools.count(1)
        self._num_open = 0
        self._open_bytes = 0
        """Size of the operations without a result."""

    def open_line(self, model_id: str) -> None:
        """Starts the numbers of a model's calls at 1."""
        with self._lock:
            self._lines.setdefault(model_id, _Line())

    def close_line(self, model_id: str) -> None:
        """Ends a model's calls; those waiting for a missing number fail."""
        with self._lock:
            line = self._lines.pop(model_id, None)
        for _, request in [] if line is None else line.waiting:
            self.finish(request, Failed("the session was closed before an earlier call arrived", "user"))

    def has_line(self, model_id: str) -> bool:
        with self._lock:
            return model_id in self._lines

    def submit(self, operation: Operation, request_id: str | None = None) -> Request:
        """Queues a request without an order; a repeated `request_id` is the same request."""
        with self._lock:
            request, is_new = self._request(operation, request_id or f"request:{next(self._numbers)}")
            if is_new:
                self._begin(request)
            return request

    def submit_in_order(self, operation: Operation, model_id: str, number: int) -> Request:
        """Queues a call of a model, which runs after those of smaller numbers.

        Raises:
            KeyError: The model does not exist, or this number has had its turn and its result was dropped.
            DataError: The number is so far ahead that the calls before it could not all wait.
            FullError: Too many requests are waiting.
        """
        with self._lock:
            line, request_id = self._lines[model_id], f"{model_id}:{number}"
            if number < line.next and request_id not in self._requests:
                raise KeyError(request_id)
            if number >= line.next + _MOST_WAITING:
                raise DataError(f"seq_id={number} is too far ahead; the next call of this model is {line.next}")
            request, is_new = self._request(operation, request_id)
            if is_new:
                line.latest = self._clock()
                heapq.heappush(line.waiting, (number, request))
                while line.waiting and line.waiting[0][0] == line.next:
                    self._begin(heapq.heappop(line.waiting)[1])
                    line.next += 1
            return request

    def give_up(self) -> None:
        """Refuses the calls after a number that has been missing for a minute, since their step is incomplete."""
        with self._lock:
            limit = self._clock() - _PATIENCE_S
            for model_id, line in self._lines.items():
                if not line.waiting or line.latest > limit:
                    continue
                why = f"call {line.next} of this model did not arrive in {_PATIENCE_S:g} s, so later calls do not run"
                for number, request in sorted(line.waiting, key=lambda call: call[0]):
                    self._open_bytes -= request.num_bytes
                    request.operation = Refuse(model_id, f"{why}; begin a new step", is_of_step=True)
                    self._begin(request)
                    line.next = number + 1
                line.waiting.clear()

    def finish(self, request: Request, result: Done | Failed) -> None:
        """Sets a result and calls its listeners."""
        with self._lock:
            self._num_open -= 1
            self._open_bytes -= request.num_bytes
            request.operation, request.result = None, result
            listeners, request.listeners = request.listeners, []
            self._finished.append(request)
            self._num_bytes += request.num_bytes
            while len(self._finished) > _MOST_RESULTS or self._num_bytes > _MOST_BYTES:
                forgotten = self._finished.popleft()
                self._num_bytes -= forgotten.num_bytes
                del self._requests[forgotten.id]
        for listener in listeners:
            listener()

    def end(self) -> None:
        """Fails all requests without a result, since the engine has ended."""
        with self._lock:
            waiting = [request for request in self._requests.values() if request.result is None]
        why = "the service was stopped before this call; start it again, and continue from a checkpoint"
        for request in waiting:
            self.finish(request, Failed(why, "server"))

    def find(self, request_id: str) -> Request | None:
        """Returns a request, unless its result was dropped."""
        with self._lock:
            return self._requests.get(request_id)

    def listen(self, request: Request, listener: Callable[[], object]) -> bool:
        """Calls `listener` once the result exists; returns False, without a call, if it exists already."""
        with self._lock:
            if request.result is not None:
                return False
            request.listeners.append(listener)
            return True

    def _request(self, operation: Operation, request_id: str) -> tuple[Request, bool]:
        known = self._requests.get(request_id)
        if known is not None:
            return known, False
        made = Request(request_id, operation)
        # one batch may always wait, since its size is bounded by that of a body
        if self._num_open >= _MOST_WAITING or 0 < self._open_bytes > _MOST_BYTES - made.num_bytes:
            raise FullError
        self._requests[request_id] = made
        self._num_open += 1
        self._open_bytes += made.num_bytes
        return made, True
