"""Connection between a service's engine and its HTTP process.

Requests arrive as `(id, operation)`, and results return as `(id, result)`. Both ends pickle checked operations, never
the bytes of a client.
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
"""Longest time for the process to end after the engine; it gives its clients 2 s."""


@dataclass(frozen=True)
class Setup:
    """First message, with everything that the HTTP process needs."""

    base: Served
    folder: Path
    token: str | None
    lock: int
    """Descriptor of the store's lock."""
    listener: int
    """Descriptor of the listening socket."""


def framed(content: object) -> bytes:
    """Returns a message as bytes: its size, then its pickle."""
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
        request: tuple[str, Operation] | None = self.receive() if wait([self._connection], timeout_s) else None
        return request

    def finish(self, request_id: str, result: Done | Failed) -> None:
        """Sends a result; if the other process has ended, the next `take` raises."""
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
    local_end, other = socket.socketpair()
    with local_end, other:
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
            raise MachineError(f"cannot start the HTTP process: {fault}; free memory") from None
        other.close()  # else this process would not notice that the other one ends
        try:
            link = Link(local_end)
            try:
                link.send(setup)
                link.receive()
            except (EOFError, OSError):
                raise MachineError(
                    f"the HTTP process ended at its start (exit code {process.wait()}); correct the cause, which it "
                    "has printed above"
                ) from None
            yield link
        finally:
            local_end.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
