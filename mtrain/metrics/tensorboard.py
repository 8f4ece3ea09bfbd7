"""The run's curves for TensorBoard."""

import io
import itertools
import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from mtrain.base.files import disk_faults
from mtrain.metrics.appended import AppendedFile
from mtrain.metrics.record import ChangeRecord, Record, StepRecord, ValidRecord

_numbers = itertools.count()


class TensorBoardSink:
    """Writes every number of a record as a scalar at its step.

    TensorBoard's own writer hands events to a thread that a full disk ends, and leaves half an event, behind which its
    reader sees nothing; so whole events are appended here.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        """Opens an event file; TensorBoard hides what an earlier attempt wrote beyond `resume_step`."""
        with disk_faults(f"write TensorBoard events in {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        # names sort by time; TensorBoard reads the folder's files in that order
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        first_hidden = 0 if resume_step == 0 else resume_step + 1
        begin = [
            Event(wall_time=time.time(), file_version="brain.Event:2"),
            Event(wall_time=time.time(), step=first_hidden, session_log=SessionLog(status=SessionLog.START)),
        ]
        self._file = AppendedFile(folder / name, b"".join(map(_framed, begin)))

    def write(self, record: Record) -> None:
        """Appends the record's scalars, as one event; it waits where the disk refuses."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in _scalars(record).items()]
        event = Event(wall_time=time.time(), step=record.step, summary=Summary(value=values))
        self._file.append(record.step, _framed(event))

    def close(self) -> None:
        """Closes the file.

        Raises:
            MachineError: The disk has refused events to the end.
        """
        self._file.close()


def _framed(event: Event) -> bytes:
    """With length and checksums, as TensorBoard reads it."""
    framed = io.BytesIO()
    RecordWriter(framed).write(event.SerializeToString())
    return framed.getvalue()


def _scalars(record: Record) -> dict[str, float]:
    match record:
        case ChangeRecord():
            return {}
        case ValidRecord():
            sets = {f"valid/loss/{name}": each.loss for name, each in record.valid_sets.items()}
            return {"valid/loss": record.valid_loss} | sets | _term_means(record, "valid_terms")
        case StepRecord():
            loss = {} if record.empty else {"train/loss": record.loss}
            known = {
                "train/loss_scale": record.loss_scale,
                "speed/mfu": record.mfu,
                "speed/flops_per_second": _per_second(record.flops, record.seconds),
                "speed/loss_tokens_per_second": _per_second(record.loss_tokens, record.seconds),
                "tokens/padding": record.padding_tokens,
                "tokens/loss": record.loss_tokens,
            }
            return {
                **loss,
                "train/grad_norm": record.grad_norm,
                "train/lr": record.lr,
                "train/denominator": record.denominator,
                "speed/tokens_per_second": record.tokens_per_second,
                "speed/seconds": record.seconds,
                "tokens/text": record.tokens,
                **_term_means(record, "terms"),
                **{tag: value for tag, value in known.items() if value is not None},
            }


def _per_second(count: float | None, seconds: float) -> float | None:
    return None if count is None or seconds <= 0 else count / seconds


def _term_means(record: StepRecord | ValidRecord, prefix: str) -> dict[str, float]:
    """Terms that had something to learn."""
    return {f"{prefix}/{name}": term.loss for name, term in record.terms.items() if term.denominator != 0}
