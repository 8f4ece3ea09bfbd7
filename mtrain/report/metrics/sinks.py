"""Sinks for records: console, TensorBoard, and several as one. One rank writes; other ranks have an empty `Sinks`."""

import io
import itertools
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from mtrain.base.errors import MachineError, MtrainError
from mtrain.base.files import disk_faults
from mtrain.base.notebook import CellOutput, is_in_notebook
from mtrain.report.metrics.jsonl import AppendedFile
from mtrain.report.metrics.record import (
    PACE_STEPS,
    ChangeRecord,
    Record,
    StepRecord,
    TaskRecord,
    ValidRecord,
    remaining_s,
    scalars,
)
from mtrain.report.metrics.shown import LAYOUT_DEPENDENT, as_duration, as_line, side_terms, step_numbers
from mtrain.report.metrics.trackers.open import TrackerSink

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives records in the order of their steps."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None:
        """Finishes; no record may follow."""


class Sinks:
    """Several sinks as one; the end of the `with` block closes all of them."""

    def __init__(self, *sinks: Sink, check: Callable[[], None] = lambda: None) -> None:
        """Writes to `sinks` in this order, metrics.jsonl first; `check` raises if another start has the run folder."""
        self._sinks, self._check = sinks, check

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
                _log.warning(f"warning: {fault}")

    def write(self, record: Record) -> None:
        self._check()
        for sink in self._sinks:
            sink.write(record)

    def write_text(self, tag: str, text: str, step: int) -> None:
        """Passes a text to the sinks that can show texts."""
        for sink in self._sinks:
            if isinstance(sink, TensorBoardSink | TrackerSink):
                sink.write_text(tag, text, step)

    def close(self) -> None:
        faults: list[MachineError] = []

        def close(sink: Sink) -> None:
            try:
                sink.close()
            except MachineError as fault:
                faults.append(fault)

        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(close, sink)
        if faults:
            raise MachineError("; ".join(map(str, faults)))


_BAR_WIDTH, _SHORTEST_BAR = 40, 8
"""Usual width of the bar in characters, and its width on a narrow terminal."""
_CELL_INTERVAL_S, _MAX_CELL_LINES = 0.2, 20
"""Smallest interval between two updates of a notebook's bar, and largest number of lines under it."""


class ConsoleSink:
    """Shows steps with loss, gradient norm, tokens per second and remaining time."""

    def __init__(
        self,
        num_steps: int,
        resume_step: int = 0,
        *,
        interval_steps: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the display.

        Args:
            interval_steps: Interval of plain lines, which also appear at the last step; the bar moves at every step.
            console: Standard output by default, or the cell of a notebook; only a terminal and a cell show a bar.
        """
        self._num_steps = num_steps
        self._interval_steps = interval_steps
        self._console = Console() if console is None else console
        self._clock = clock
        self._marks = deque([(resume_step, clock())], maxlen=PACE_STEPS + 1)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._cell = CellBar(num_steps, resume_step, clock) if console is None and is_in_notebook() else None
        if self._cell is None and self._console.is_terminal:
            self._line = BarColumn()
            columns = (TextColumn("train"), self._line, MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=num_steps, completed=resume_step)
            self._bar.start()

    def write(self, record: Record) -> None:
        match record:
            case StepRecord():
                self._marks.append((record.step, self._clock()))
                self._show_step(record, as_duration(remaining_s(self._marks, self._num_steps)))
            case ValidRecord():
                parts = [f"step {record.step}/{self._num_steps}", f"valid_loss {record.valid_loss:.4f}"]
                parts += [f"{name} {term.loss:.4f}" for name, term in record.valid_sets.items()]
                shown = as_line(side_terms(record) | {"samples": str(record.samples)})
                parts += [shown, f"{record.seconds:.1f} s", *[LAYOUT_DEPENDENT] * record.layout_dependent]
                self._print("  ".join(parts))
            case TaskRecord():
                numbers = as_line({name: f"{value:.4f}" for name, value in record.tasks.items()})
                self._print(f"step {record.step}/{self._num_steps}  {numbers}  {record.seconds:.1f} s")
            case ChangeRecord():
                self._print(f"step {record.step}/{self._num_steps}  from here on {record}")

    def close(self) -> None:
        """Leaves the bar as it is and releases the terminal."""
        if self._bar is not None:
            self._bar.stop()
        if self._cell is not None:
            self._cell.close()

    def _show_step(self, record: StepRecord, eta: str) -> None:
        remarks = ["empty batch"] * record.empty
        remarks += [] if record.skipped is None else [f"skipped: {record.skipped}"]
        remarks += [LAYOUT_DEPENDENT] * record.layout_dependent
        numbers, ends = step_numbers(record), [*remarks, f"eta {eta}"]
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, description=self._fitted(numbers, ends))
        elif self._cell is not None:
            self._cell.advance(record.step, "  ".join([as_line(numbers), *ends]))
        elif record.step % self._interval_steps == 0 or record.step == self._num_steps:
            self._print(f"step {record.step}/{self._num_steps}  {'  '.join([as_line(numbers), *ends])}")

    def _fitted(self, numbers: dict[str, str], ends: list[str]) -> str:
        """Returns the text after the bar: as many numbers as fit, at least the loss; the bar gets shorter first."""
        room = self._console.width - len("train  ") - len(f" {self._num_steps}/{self._num_steps} ")
        fitting = dict(numbers)
        while True:
            text = "  ".join([as_line(fitting), *ends])
            self._line.bar_width = min(_BAR_WIDTH, max(_SHORTEST_BAR, room - len(text)))
            if len(text) + self._line.bar_width <= room or len(fitting) == 1:
                return text
            fitting.popitem()

    def _print(self, line: str) -> None:
        if self._cell is not None:
            self._cell.add(line)
        else:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class CellBar:
    """Progress bar of a run in a notebook's cell, with lines of validations below."""

    def __init__(self, num_steps: int, step: int, clock: Callable[[], float]) -> None:
        self._num_steps, self._step, self._clock = num_steps, step, clock
        self._text, self._lines = "", deque[str](maxlen=_MAX_CELL_LINES)
        self._output, self._shown_s = CellOutput(), -math.inf
        self._show()

    def advance(self, step: int, text: str) -> None:
        """Moves the bar to a step; quick steps are shown only every `_CELL_INTERVAL_S`."""
        self._step, self._text = step, text
        if self._clock() - self._shown_s >= _CELL_INTERVAL_S:
            self._show()

    def add(self, line: str) -> None:
        self._lines.append(line)
        self._show()

    def close(self) -> None:
        """Shows the last step."""
        self._show()

    def _show(self) -> None:
        self._shown_s = self._clock()
        count = f"{self._step}/{self._num_steps}"
        bar = f'<progress value="{self._step}" max="{self._num_steps}"></progress> {count}'
        below = "".join(f"<br>{escape(line)}" for line in (self._text, *self._lines))
        lines = "\n".join((f"train {count}  {self._text}", *self._lines))
        self._output.show(f'<div style="font-family: monospace">{bar}{below}</div>', lines)


_numbers = itertools.count()


class TensorBoardSink:
    """Writes every number of a record as a scalar at its step.

    TensorBoard's own writer uses a thread that dies on a full disk and leaves a partial event, after which its reader
    sees nothing; so this sink appends whole events.
    """

    def __init__(self, folder: Path, resume_step: int, texts: Mapping[str, str] | None = None) -> None:
        """Opens an event file; `texts` by tag, such as the configuration of this start, appear verbatim."""
        with disk_faults(f"write TensorBoard events in {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        # names sort by time; TensorBoard reads the folder's files in that order
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        first_hidden = 0 if resume_step == 0 else resume_step + 1
        begin = [
            Event(wall_time=time.time(), file_version="brain.Event:2"),
            Event(wall_time=time.time(), step=first_hidden, session_log=SessionLog(status=SessionLog.START)),
        ]
        begin += [_text_event(tag, text, resume_step) for tag, text in (texts or {}).items()]
        self._file = AppendedFile(folder / name, b"".join(map(_framed, begin)))

    def write(self, record: Record) -> None:
        """Appends the record's scalars as one event; the event waits if the disk refuses."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record).items()]
        event = Event(wall_time=time.time(), step=record.step, summary=Summary(value=values))
        self._file.append(record.step, _framed(event))

    def write_text(self, tag: str, text: str, step: int) -> None:
        self._file.append(step, _framed(_text_event(tag, text, step)))

    def close(self) -> None:
        """Closes the file; raises MachineError if the disk has refused events to the end."""
        self._file.close()


def _text_event(tag: str, text: str, step: int) -> Event:
    """Makes an event for the text plugin: a tensor of strings, in Markdown, where four spaces keep lines verbatim."""
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    tensor = TensorProto(
        dtype=DT_STRING, tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]), string_val=[lines.encode()]
    )
    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    value = Summary.Value(tag=f"{tag}/text_summary", metadata=plugin, tensor=tensor)
    return Event(wall_time=time.time(), step=step, summary=Summary(value=[value]))


def _framed(event: Event) -> bytes:
    """Serializes an event with length and checksums, as TensorBoard reads it."""
    framed = io.BytesIO()
    RecordWriter(framed).write(event.SerializeToString())
    return framed.getvalue()
