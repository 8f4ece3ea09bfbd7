"""Connection between a service's engine and its HTTP process.

Requests arrive as `(id, operation)`, and results return as `(id, result)`. Both processes are ours: they pickle checked
operations, never the bytes of a client.
"""

import asyncio
import contextlib
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from mtrain.base.environment import with_package
from mtrain.base.errors import MachineError
from mtrain.serve.operations import Done, Failed, Operation
from mtrain.serve.served import Served

_SIZE = struct.Struct("!Q")
_END_S = 10.0
"""Seconds that the process has to end after the engine; it gives its clients 2 s."""


@dataclass(frozen=True)
class Setup:
    """What the process needs to know, sent first."""

    base: Served
    folder: Path
    token: str | None
    lock: int
    """Descriptor of the store's lock."""
    listener: int
    """Descriptor of the listening socket."""


def framed(content: object) -> bytes:
    """Returns a message as it is written to the connection."""
    written = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return _SIZE.pack(len(written)) + written


async def received(reader: asyncio.StreamReader) -> Any:
    """Reads a message; raises asyncio.IncompleteReadError once the engine has ended."""
    size = _SIZE.unpack(await reader.readexactly(_SIZE.size))[0]
    return pickle.loads(await reader.readexactly(size))


class Link:
    """The engine's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def take(self, timeout_s: float) -> tuple[str, Operation] | None:
        """Returns the next request with its id; None after `timeout_s` without one. Raises EOFError once the other
        process has ended."""
        found: tuple[str, Operation] | None = self.receive() if wait([self._connection], timeout_s) else None
        return found

    def finish(self, request_id: str, result: Done | Failed) -> None:
        """Sends a result; if nobody reads it any more, the next `take` says so."""
        with contextlib.suppress(OSError):
            self.send((request_id, result))

    def send(self, content: object) -> None:
        self._connection.sendall(framed(content))

    def receive(self) -> Any:
        """Reads a message; raises EOFError once the other process has ended."""
        return pickle.loads(self._read(_SIZE.unpack(self._read(_SIZE.size))[0]))

    def _read(self, size: int) -> bytearray:
        whole = bytearray(size)
        left = memoryview(whole)
        while left:
            try:
                count = self._connection.recv_into(left)
            except ConnectionError:
                count = 0
            if not count:
                raise EOFError
            left = left[count:]
        return whole


@contextlib.contextmanager
def linked(setup: Setup) -> Iterator[Link]:
    """Runs an HTTP process; it ends with the `with` block, or with this process.

    Threads of this process would compete with the engine for the interpreter, which costs each step milliseconds.
    """
    own, other = socket.socketpair()
    with own, other:
        try:
            process = subprocess.Popen(
                # -P: `mtrain` does not import from the working directory either
                [sys.executable, "-P", "-m", "mtrain.serve.http_process", str(other.fileno())],
                pass_fds=[other.fileno(), setup.lock, setup.listener],
                stdin=subprocess.DEVNULL,
                env={**with_package(os.environ), "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # Ctrl-C is for the engine
            )
        except OSError as fault:
            raise MachineError(f"the process that speaks HTTP cannot be started: {fault}; free memory") from None
        other.close()  # else the end of the process would go unseen
        try:
            link = Link(own)
            try:
                link.send(setup)
                link.receive()
            except (EOFError, OSError):
                raise MachineError(
                    f"the process that speaks HTTP has ended at its start (exit code {process.wait()}); repair what it "
                    "says above"
                ) from None
            yield link
        finally:
            own.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
