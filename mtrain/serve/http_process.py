"""The process of a service that speaks HTTP: `python -m mtrain.serve.http_process`, which `mtrain.serve.link` starts.

It needs no torch. It ends when the engine does, whatever signals are sent to a whole job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Iterator

import uvicorn
from starlette.concurrency import run_in_threadpool

from mtrain.base.errors import MachineError
from mtrain.base.log import show_lines
from mtrain.base.signals import ignore_stop_signals
from mtrain.serve.app import App
from mtrain.serve.desk import Desk, Sessions
from mtrain.serve.link import Setup, framed, received
from mtrain.serve.store import Store

_log = logging.getLogger(__name__)

_SESSION_S = 600.0
"""Time without a sign of a client after which its models are freed; the SDK sends one every 10 s."""
_TIDY_S = 5.0
"""Time between two looks for sessions and checkpoints whose time is over."""


class Server(uvicorn.Server):
    """A server that leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing."""
        yield


def server_of(app: App) -> Server:
    """Returns the server of an application."""
    return Server(
        uvicorn.Config(
            app.asgi(),
            http="h11",  # bounds the headers; uvicorn would take httptools, which does not, where that is installed
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",  # a call for one is answered as any other
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=65536,
        )
    )


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    setup: Setup = await received(reader)
    desk = Desk(lambda request: writer.write(framed((request.id, request.operation))))
    app = App(setup.base, desk, Sessions(_SESSION_S), Store(setup.folder, lock=setup.lock), setup.token)
    server = server_of(app)
    writer.write(framed(None))  # ready: connections that are there already wait for `accept`
    async with asyncio.TaskGroup() as group:
        others = group.create_task(_finish(reader, desk, server)), group.create_task(_tidy(app))
        await server.serve([socket.socket(fileno=setup.listener)])
        for each in others:
            each.cancel()


async def _finish(reader: asyncio.StreamReader, desk: Desk, server: Server) -> None:
    """Hands results over until the engine ends."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            request_id, result = await received(reader)
            request = desk.find(request_id)
            assert request is not None, "only requests that have a result are forgotten"
            desk.finish(request, result)
    desk.end()
    server.should_exit = True


async def _tidy(app: App) -> None:
    while True:
        for session_id in app.sessions.lost():
            app.unload(session_id)
        try:
            await run_in_threadpool(app.store.expire)
        except MachineError as fault:
            _log.warning(f"checkpoints whose time is over stay for now: {fault}")
        await asyncio.sleep(_TIDY_S)


if __name__ == "__main__":
    ignore_stop_signals()
    show_lines()
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
