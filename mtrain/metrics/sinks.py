"""Sinks for records. One rank writes; the others have an empty `Sinks`."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol

from mtrain.base.errors import MachineError, MtrainError
from mtrain.metrics.console import ConsoleSink
from mtrain.metrics.jsonl import JsonlSink
from mtrain.metrics.record import Record
from mtrain.metrics.tensorboard import TensorBoardSink
from mtrain.metrics.trackers.sink import TrackerSink

__all__ = ["ConsoleSink", "Fence", "JsonlSink", "Sink", "Sinks", "TensorBoardSink"]


class Sink(Protocol):
    """Receiver of records in the order of their steps."""

    def write(self, record: Record) -> None:
        """Takes one record."""

    def close(self) -> None:
        """Finishes; no record follows."""


class Fence:
    """Sink that checks, before a record is written, whether this start of the run still owns the folder."""

    def __init__(self, check: Callable[[], None]) -> None:
        """Args:
        Function that raises where another start has taken the folder over.
        """
        self._check = check

    def write(self, record: Record) -> None:
        """Calls `check`, which may raise."""
        self._check()

    def close(self) -> None:
        """Does nothing, as nothing is open."""


class Sinks:
    """Several sinks as one; the end of the `with` block closes all of them."""

    def __init__(self, *sinks: Sink) -> None:
        """Sets the order of writes; metrics.jsonl should come first, as it is authoritative."""
        self._sinks = sinks

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except MachineError as fault:
            if error is None:
                raise
            if isinstance(error, MtrainError):
                error.args = (f"{error}; {fault}",)  # the run ends with one message
            else:
                print(f"warning: {fault}", file=sys.stderr, flush=True)

    def write(self, record: Record) -> None:
        """Hands the record to every sink."""
        for sink in self._sinks:
            sink.write(record)

    def write_text(self, tag: str, text: str, step: int) -> None:
        """Hands a text to the sinks that can show texts."""
        for sink in self._sinks:
            if isinstance(sink, TensorBoardSink | TrackerSink):
                sink.write_text(tag, text, step)

    def close(self) -> None:
        """Closes every sink, also where one of them fails.

        Raises:
            MachineError: A disk has refused records to the end; the message names all files that lack some.
        """
        faults: list[MachineError] = []
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(_close, sink, faults)
        if faults:
            raise MachineError("; ".join(map(str, faults)))


def _close(sink: Sink, faults: list[MachineError]) -> None:
    try:
        sink.close()
    except MachineError as fault:
        faults.append(fault)
