"""The HTTP process of a service: `python -m mtrain.serve.http_process`, started by `mtrain.serve.link`.

It needs no torch, and ends when the engine does; signals to the job do not end it.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import sys
import time
from collections.abc import Iterator

import uvicorn
from starlette.concurrency import run_in_threadpool
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtrain.base.errors import MachineError
from mtrain.base.log import show_lines
from mtrain.base.signals import ignore_stop_signals
from mtrain.serve.app import App
from mtrain.serve.desk import Desk
from mtrain.serve.link import Setup, framed, received
from mtrain.serve.store import Store

_log = logging.getLogger(__name__)

_SESSION_S = 600.0
"""Seconds after a client's latest heartbeat until its models are freed; the SDK sends one every 10 s."""
_TIDY_S, _EXPIRY_S = 5.0, 60.0
"""Seconds between checks for expired sessions and calls, and for expired checkpoints, which read folders."""
_MOST_CONNECTIONS = 2**14
_OTHER_FILES = 256
"""Files that may be open in addition to connections."""


class Server(uvicorn.Server):
    """Server that installs no signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Connection(H11Protocol):
    """Connection that may be closed in favour of a new one while it waits for its client.

    The number of open files limits connections; without this, clients could not connect once it is reached.
    """

    latest = 0.0
    """Time of the latest bytes, by the loop's clock."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Closes the connection whose client has been silent for longest if too many are open."""
        super().connection_made(transport)
        self.latest = self.loop.time()
        if len(self.connections) > _most_connections():
            waiting = [peer for peer in self.connections if isinstance(peer, Connection) and peer.waits_for_client]
            longest = min(waiting, key=lambda peer: peer.latest)
            self.connections.discard(longest)
            longest.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.latest = self.loop.time()
        super().data_received(data)

    @property
    def waits_for_client(self) -> bool:
        """Says whether the client is next: with a request, or with the rest of one."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body


def _most_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(_MOST_CONNECTIONS, max(1, soft - _OTHER_FILES))


def server_of(app: App) -> Server:
    return Server(
        uvicorn.Config(
            app.asgi(),
            http=Connection,  # of h11, which bounds the headers; httptools does not
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",  # a request for a websocket is answered like any other
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=65536,
        )
    )


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    setup: Setup = await received(reader)
    desk = Desk(lambda request: writer.write(framed((request.id, request.operation))))
    app = App(setup.base, desk, Store(setup.folder, lock=setup.lock), setup.token)
    server = server_of(app)
    writer.write(framed(None))  # ready: earlier connections wait for `accept`
    async with asyncio.TaskGroup() as group:
        jobs = (_finish(reader, desk, server), _tidy(app), _expire(app.store))
        tasks = [group.create_task(job) for job in jobs]
        await server.serve([socket.socket(fileno=setup.listener)])
        for task in tasks:
            task.cancel()


async def _finish(reader: asyncio.StreamReader, desk: Desk, server: Server) -> None:
    """Passes on results until the engine ends."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            request_id, result = await received(reader)
            request = desk.find(request_id)
            assert request is not None, "only requests with a result are forgotten"
            desk.finish(request, result)
    desk.end()
    server.should_exit = True


async def _tidy(app: App) -> None:
    while True:
        app.desk.give_up()
        limit = time.monotonic() - _SESSION_S
        for session_id in [session_id for session_id, seen in app.sessions.items() if seen < limit]:
            app.end(session_id)
        await asyncio.sleep(_TIDY_S)


async def _expire(store: Store) -> None:
    while True:
        try:
            await run_in_threadpool(store.expire)
        except MachineError as fault:
            _log.warning(f"expired checkpoints stay for now: {fault}")
        await asyncio.sleep(_EXPIRY_S)


def _allow_files() -> None:
    """Raises the limit of open files, since each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * _MOST_CONNECTIONS
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


if __name__ == "__main__":
    ignore_stop_signals()
    _allow_files()
    show_lines()
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
