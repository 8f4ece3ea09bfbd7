"""Runs a service: HTTP in a thread of the first rank, the engine in the main thread of every rank."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import uvicorn

from mtrain.base.errors import MachineError
from mtrain.base.files import disk_faults, write_atomically
from mtrain.base.signals import StopSignal
from mtrain.config.schema.loss import LossSection
from mtrain.mcore.distributed.init import on_first_rank
from mtrain.runs.folder import RunFolder
from mtrain.serve.app import App
from mtrain.serve.asked import BaseModel
from mtrain.serve.checked import check_served, check_token
from mtrain.serve.desk import Desk, Sessions
from mtrain.serve.store import Store
from mtrain.serve.work import Operation, Served, Worker

_log = logging.getLogger(__name__)

_SESSION_S = 600.0
"""Time without a sign of a client after which its models are freed; the SDK sends one every 10 s."""
_WILDCARDS = ("0.0.0.0", "::")
"""Hosts that stand for every address of a machine, at none of which a client elsewhere finds it."""


@dataclass(frozen=True)
class _Stop:
    """Order that ends the work of every rank."""

    received: signal.Signals


def serve(served: Served, host: str, port: int, token: str | None) -> None:
    """Serves until a signal ends it. On every rank.

    Args:
        served: The model, its layout and its precision; what is trained is the clients' affair.
        host: Address that the first rank listens at.
        port: Port; 0: any that is free.
        token: Key that clients have to send; None: none, for addresses of this machine alone.

    Raises:
        ConfigError: The configuration is none of a language model, or a key is missing.
        MachineError: The address cannot be used.
    """
    config = served.config
    check_served(config.model, config.adapter)
    check_token(host, token)
    # sums that nothing divides: what a client divides by, it puts into its weights
    config = config.model_copy(update={"loss": LossSection(aggregation="sum", chunk_tokens=config.loss.chunk_tokens)})
    folder = RunFolder(Path(config.run.dir))
    served = Served(config)
    store = Store(folder.path)
    worker = Worker(served, store)
    try:
        with contextlib.ExitStack() as held:
            desk, sessions = Desk(), Sessions(_SESSION_S)

            def opened() -> App:
                folder.create()
                held.enter_context(folder.locked())
                folder.clear_requeue()
                store.restore()
                model, has_tokenizer = config.model, served.tokenizer is not None
                stops = _stops(model.hf)
                base = BaseModel(served.name, config.data.seq_length, stops, has_tokenizer, model.tied_embeddings)
                app = App(base, desk, sessions, store, token)
                held.enter_context(_listening(app, host, port, folder))
                return app

            holder: list[App] = []
            on_first_rank(lambda: holder.append(opened()))
            stopped = _work(worker, desk, sessions, holder[0] if holder else None, config.train.process_group_timeout_s)
            if holder and stopped is not signal.SIGINT:  # Ctrl-C means that nobody wants it any more
                folder.set_requeue(f"{stopped.name} to a service")
    finally:
        worker.close()


def _work(worker: Worker, desk: Desk, sessions: Sessions, app: App | None, timeout_s: float) -> signal.Signals:
    """Runs operations until the first rank is asked to stop; returns the signal. Collective."""
    idle_s = min(5.0, timeout_s / 4)  # ranks that wait for an operation would take silence for a lost rank
    with StopSignal() as stop:
        while True:
            request = None
            agreed: list[Operation | _Stop | None] = [None]
            if app is not None:
                for session_id in sessions.lost():
                    app.unload(session_id)
                app.store.expire()
                stopped = stop.received
                request = None if stopped else desk.take(idle_s)
                agreed = [_Stop(stopped) if stopped else None if request is None else request.operation]
            if dist.get_world_size() > 1:  # a rank alone would wait for threads of gloo, which the clients keep waiting
                dist.broadcast_object_list(agreed, src=0)
            operation = agreed[0]
            if isinstance(operation, _Stop):
                return operation.received
            result = None if operation is None else worker.run(operation)
            if request is not None and result is not None:
                desk.finish(request, result)


def listener_at(host: str, port: int) -> socket.socket:
    """Returns a socket that listens; what is written to its connections leaves at once.

    Raises:
        MachineError: The address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as fault:
        raise MachineError(f"cannot listen at {host} port {port}: {fault}; choose another --port, or 0") from None
    # head and body of an answer are two writes: the second would wait 40 ms for the client's delayed acknowledgement.
    # asyncio sets this only on sockets that name their protocol, which create_server leaves at 0
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextlib.contextmanager
def _listening(app: App, host: str, port: int, folder: RunFolder) -> Iterator[None]:
    """Listens in a thread, and says where."""
    listener = listener_at(host, port)
    # on Slurm, nodes know each other by its names
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname()) if host in _WILDCARDS else host
    address = f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}"
    server = uvicorn.Server(
        uvicorn.Config(
            app.asgi(),
            http="h11",  # bounds the headers; uvicorn would take httptools, which does not, where that is installed
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=65536,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True, name="http")
    thread.start()
    with disk_faults(f"write {folder.path}"):
        found = {"address": address, "model": app.base.name, "slurm_job": os.environ.get("SLURM_JOB_ID")}
        write_atomically(folder.path / "service.json", json.dumps(found))
    _log.info(f"serving {app.base.name} at {address}")
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(10)


def _stops(hf: str | None) -> frozenset[int]:
    """Returns the tokens that end a text, as the folder of Hugging Face names them."""
    if hf is None:
        return frozenset()
    for file in ("generation_config.json", "config.json"):
        path = Path(hf) / file
        found = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
