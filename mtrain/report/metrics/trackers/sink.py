"""Sink for a tracker that cannot stop a run: it has a thread of its own, and drops what the tracker does not accept."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from mtrain.base.background import started
from mtrain.report.metrics.record import Record, scalars

_log = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""Most records that wait for a slow tracker; later ones are dropped and counted."""
PATIENCE_S = 10.0
"""Seconds that the end of a run waits for a tracker."""


class Tracker(Protocol):
    """Run at a tracker; any method may fail or hang."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def log_text(self, step: int, tag: str, text: str) -> None:
        """Sends a text to be shown verbatim, if the tracker can show one."""

    def finish(self) -> None:
        """Ends this start of the run, which later starts may continue."""


class _Text(NamedTuple):
    step: int
    tag: str
    text: str


class TrackerSink:
    """Passes records to a thread, which opens the tracker and sends them."""

    def __init__(
        self, name: str, opened: Callable[[], Tracker], most_waiting: int = MOST_WAITING, patience_s: float = PATIENCE_S
    ) -> None:
        """Starts the thread, which calls `opened` to connect."""
        self._name, self._opened, self._patience_s = name, opened, patience_s
        self._waiting: queue.Queue[Record | _Text] = queue.Queue(most_waiting)
        self._closing = threading.Event()
        self._num_given = self._num_taken = 0
        self._has_texts = False
        self._fault: str | None = None
        self._work = started(self._feed, f"tracker {name}")

    def write(self, record: Record) -> None:
        """Passes the record on at once; drops it if the tracker has ended or is too far behind."""
        self._hand_over(record)

    def write_text(self, tag: str, text: str, step: int) -> None:
        """Passes a text on in the same way as a record."""
        self._has_texts = True
        self._hand_over(_Text(step, tag, text))

    def _hand_over(self, record: Record | _Text) -> None:
        self._num_given += 1
        if self._work.done():
            return
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            if self._fault is None:
                self._fault = f"{self._waiting.maxsize} records wait for it"
                self._tell(f"{self._fault}; those that follow are lost to it, metrics.jsonl has them")

    def close(self) -> None:
        """Waits a little for the rest, and reports what the tracker has not received."""
        self._closing.set()
        deadline = time.monotonic() + self._patience_s
        while not self._work.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._work.done():
            self._tell(f"it has not ended within {self._patience_s:g} s and is left behind")
        if (missing := self._num_given - self._num_taken) > 0:
            kept = "metrics.jsonl and samples.jsonl have" if self._has_texts else "metrics.jsonl has"
            self._tell(f"it lacks {missing} of {self._num_given} records of this start; {kept} them")

    def _feed(self) -> None:
        try:
            tracker = self._opened()
            while not (self._closing.is_set() and self._waiting.empty()):
                try:
                    record = self._waiting.get(timeout=0.1)
                except queue.Empty:
                    continue
                self._log(tracker, record)
            tracker.finish()
        except Exception as fault:  # whatever an external library raises, training goes on
            self._tell(f"{_said(fault)}; training goes on without it")

    def _log(self, tracker: Tracker, record: Record | _Text) -> None:
        try:
            if isinstance(record, _Text):
                tracker.log_text(*record)
            elif numbers := scalars(record):
                tracker.log(record.step, numbers)
            self._num_taken += 1
        except Exception as fault:  # as above; the next record may succeed
            if self._fault is None:
                self._fault = _said(fault)
                self._tell(f"step {record.step}: {self._fault}; training goes on")

    def _tell(self, text: str) -> None:
        _log.warning(f"warning: tracker {self._name}: {text}")


def _said(fault: Exception) -> str:
    """Formats an error in one line of bounded length, since libraries put whole pages into their errors."""
    return f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"
