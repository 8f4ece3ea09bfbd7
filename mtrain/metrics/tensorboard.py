"""Event files of a run for TensorBoard."""

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from mtrain.base.files import disk_faults
from mtrain.metrics.appended import AppendedFile
from mtrain.metrics.record import Record, scalars

_numbers = itertools.count()


class TensorBoardSink:
    """Sink that writes every number of a record as a scalar at its step.

    TensorBoard's own writer hands events to a thread that a full disk ends, and leaves a partial event, after which its
    reader sees nothing; so whole events are appended here.
    """

    def __init__(self, folder: Path, resume_step: int, texts: Mapping[str, str] | None = None) -> None:
        """Opens an event file.

        Args:
            folder: Folder of all event files of the run.
            resume_step: Step after which TensorBoard hides what an earlier start wrote.
            texts: Texts of this start by tag, such as its configuration; shown verbatim.
        """
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
        """Appends the record's scalars, as one event; it waits where the disk refuses."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record).items()]
        event = Event(wall_time=time.time(), step=record.step, summary=Summary(value=values))
        self._file.append(record.step, _framed(event))

    def write_text(self, tag: str, text: str, step: int) -> None:
        """Appends a text, which is shown verbatim."""
        self._file.append(step, _framed(_text_event(tag, text, step)))

    def close(self) -> None:
        """Closes the file.

        Raises:
            MachineError: The disk has refused events to the end.
        """
        self._file.close()


def _text_event(tag: str, text: str, step: int) -> Event:
    """Makes an event as the text plugin reads it: a tensor of strings, in Markdown, where four spaces keep lines
    verbatim."""
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
