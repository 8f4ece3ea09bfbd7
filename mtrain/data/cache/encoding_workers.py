"""Tokenises records in several processes, always in the order of the records.

Each worker reads the files itself and encodes every n-th chunk: unpacking and splitting lines is cheap next to
tokenising. The parent takes chunk k from worker k modulo n, so nothing needs sorting, and a worker that is ahead waits.

Workers are separate programs, not children of `multiprocessing`, which would import the user's main program again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe

from mtrain.base.environment import with_package
from mtrain.base.errors import DataError, MachineError, MtrainError
from mtrain.base.signals import ignore_stop_signals, leave_if_stopped
from mtrain.core.batch.sample import SampleEncoder, TokenizedSample
from mtrain.data.cache.entry import EncodedChunk, encoded
from mtrain.data.formats.record_files import Chunk, RecordFile, chunks

TOKENISING = "the data were tokenised"
_POLL_S = 0.5


@dataclass(frozen=True)
class EncodingJob:
    """Files and encoder of a source; picklable."""

    files: tuple[RecordFile, ...]
    make_encoder: Callable[[], SampleEncoder]


def encoded_chunks(job: EncodingJob, num_workers: int) -> Iterator[EncodedChunk]:
    """Yields the samples of all records in their order, whatever `num_workers` is; 1 works in this process."""
    if num_workers == 1:
        encoder = job.make_encoder()
        for chunk in chunks(job.files):
            yield _encoded(chunk, encoder, job)
        return
    with ExitStack() as started:
        workers = [started.enter_context(_Worker(job, number, num_workers)) for number in range(num_workers)]
        turn = 0
        while (next_chunk := workers[turn].next_chunk()) is not None:
            yield next_chunk
            turn = (turn + 1) % num_workers


def _encoded(chunk: Chunk, encoder: SampleEncoder, job: EncodingJob) -> EncodedChunk:
    folder = job.files[chunk.file].path.parent
    samples: list[tuple[int, TokenizedSample]] = []
    bad: list[tuple[int, str]] = []
    for index in range(len(chunk)):
        leave_if_stopped(TOKENISING)
        try:
            result = encoder.encode(chunk.record(index), folder)
            of_record = result if isinstance(result, tuple) else (result,)
            if any(len(sample.ids) == 0 for sample in of_record):
                raise DataError("has no token; remove it")
            samples += [(chunk.first + index, sample) for sample in of_record]
        except DataError as fault:
            bad.append((chunk.first + index, str(fault)))
    return encoded(chunk.file, chunk.first, len(chunk), samples, bad)


class _Worker:
    """One encoding process; it ends with the `with` block."""

    def __init__(self, job: EncodingJob, number: int, num_workers: int) -> None:
        self._connection, other = Pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env=with_package(os.environ),
            )
        except OSError as fault:
            raise MachineError(f"cannot start a tokenising process: {fault}; free memory") from fault
        other.close()  # else this process would keep the worker's end open, and not notice that the worker died
        self._connection.send((job, number, num_workers))

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def next_chunk(self) -> EncodedChunk | None:
        """Returns the worker's next chunk; None after the last one."""
        try:
            while not self._connection.poll(_POLL_S):  # a chunk can take many polls
                leave_if_stopped(TOKENISING)
            message = self._connection.recv()
        except (EOFError, OSError) as fault:
            raise MachineError(
                f"a tokenising process died (exit code {self._process.wait()}), probably for lack of memory; free "
                "memory and start again"
            ) from fault
        if isinstance(message, MtrainError):
            raise message
        assert message is None or isinstance(message, EncodedChunk)
        return message


def _work(connection: Connection) -> None:
    job, worker, num_workers = connection.recv()
    try:
        encoder = job.make_encoder()
        for number, chunk in enumerate(chunks(job.files)):
            if number % num_workers == worker:
                connection.send(_encoded(chunk, encoder, job))
        connection.send(None)
    except MtrainError as fault:
        connection.send(fault)


if __name__ == "__main__":
    ignore_stop_signals()  # sent to a whole job: the parent ends its workers, and tells the user once
    try:
        _work(Connection(int(sys.argv[1])))
    except BrokenPipeError:  # the parent is gone
        sys.exit(1)
