"""Where records go. One rank writes; the others hold an empty `Sinks`."""

from contextlib import ExitStack
from typing import Protocol

from mtrain.metrics.console import ConsoleSink
from mtrain.metrics.jsonl import JsonlSink
from mtrain.metrics.record import Record
from mtrain.metrics.tensorboard import TensorBoardSink

__all__ = ["ConsoleSink", "JsonlSink", "Sink", "Sinks", "TensorBoardSink"]


class Sink(Protocol):
    """Takes records in the order of their steps."""

    def write(self, record: Record) -> None:
        """Takes one record."""

    def close(self) -> None:
        """Finishes; no record follows."""


class Sinks:
    """Several sinks as one; leaves the `with` block by closing all of them."""

    def __init__(self, *sinks: Sink) -> None:
        """Writes go to the sinks in this order; metrics.jsonl first, as it is the truth."""
        self._sinks = sinks

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write(self, record: Record) -> None:
        """Hands the record to every sink."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Closes every sink, also where one of them fails."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
