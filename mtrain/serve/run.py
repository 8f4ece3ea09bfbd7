"""Runs a service: HTTP in a process that the first rank starts, the engine on every rank."""

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from mtrain.base.errors import MachineError
from mtrain.base.files import disk_faults, write_atomically
from mtrain.base.signals import StopSignal
from mtrain.config.schema.loss import LossSection
from mtrain.convert.endings import ends_next_to
from mtrain.core.ranks.init import on_first_rank
from mtrain.hf.schema.files import declared_ends
from mtrain.runs.folder import RunFolder
from mtrain.serve.checked import check_served, check_token
from mtrain.serve.link import Link, Setup, linked
from mtrain.serve.operations import Operation
from mtrain.serve.served import Served
from mtrain.serve.store import Store
from mtrain.serve.work import Worker

_log = logging.getLogger(__name__)

_WILDCARDS = ("0.0.0.0", "::")
"""Hosts that stand for all addresses of a machine, which clients on other machines cannot use."""
_LOOK_S = 0.2
"""Seconds between checks for a signal while no request comes."""


def serve(served: Served, host: str, port: int, token: str | None) -> None:
    """Serves until a signal ends it; called on every rank. Port 0 chooses a free one; without a key (`token`) only
    programs of this machine may call."""
    config = served.config
    check_served(config.model, config.adapter)
    check_token(host, token)
    # undivided sums, since clients divide by their own weights
    config = config.model_copy(update={"loss": LossSection(aggregation="sum", chunk_tokens=config.loss.chunk_tokens)})
    folder = RunFolder(Path(config.run.dir))
    served = Served(config)
    store = Store(folder.path)
    worker = Worker(served, store)
    try:
        with contextlib.ExitStack() as resources:

            def opened() -> Link:
                folder.create()
                resources.enter_context(folder.locked())
                folder.clear_requeue()
                store.restore()
                return resources.enter_context(_listening(served, store, host, port, token))

            holder: list[Link] = []
            on_first_rank(lambda: holder.append(opened()))
            stopped = _work(worker, holder[0] if holder else None, config.train.process_group_timeout_s)
            if holder and stopped is not signal.SIGINT:  # after Ctrl-C it should not be started again
                folder.set_requeue(f"{stopped.name} to a service")
    finally:
        worker.close()


def _work(worker: Worker, link: Link | None, timeout_s: float) -> signal.Signals:
    """Runs operations until the first rank is asked to stop; returns the signal. Collective."""
    idle_s = min(5.0, timeout_s / 4)  # ranks that wait for an operation take a longer silence for a lost rank
    with StopSignal() as stop:
        while True:
            request_id = None
            agreed: list[Operation | signal.Signals | MachineError | None] = [None]
            if link is not None:
                try:
                    if stop.received:
                        agreed = [stop.received]
                    elif (request := _next_request(link, stop, idle_s)) is not None:
                        request_id, agreed = request[0], [request[1]]
                except EOFError:
                    agreed = [_process_lost()]
            if dist.get_world_size() > 1:
                dist.broadcast_object_list(agreed, src=0)
            operation = agreed[0]
            if isinstance(operation, signal.Signals):
                return operation
            if isinstance(operation, MachineError):
                raise operation
            result = None if operation is None else worker.run(operation)
            if link is not None and request_id is not None and result is not None:
                link.finish(request_id, result)


def _next_request(link: Link, stop: StopSignal, timeout_s: float) -> tuple[str, Operation] | None:
    """Returns the next request with its id; None after `timeout_s` without one, or after a signal."""
    end = time.monotonic() + timeout_s
    while not stop.received and (left_s := end - time.monotonic()) > 0:
        # short waits, since a signal does not interrupt `take`
        if (request := link.take(min(left_s, _LOOK_S))) is not None:
            return request
    return None


def _process_lost() -> MachineError:
    error = MachineError(
        "the HTTP process of this service has ended, probably for lack of memory; free memory and start the service "
        "again, which still has every checkpoint that it acknowledged"
    )
    error.on_every_rank = True
    return error


def listener_at(host: str, port: int) -> socket.socket:
    """Returns a listening socket whose connections send small writes immediately (TCP_NODELAY)."""
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
def _listening(served: Served, store: Store, host: str, port: int, token: str | None) -> Iterator[Link]:
    folder, hf = Path(served.config.run.dir), served.config.model.hf
    stops = frozenset(declared_ends(None if hf is None else Path(hf)))
    if served.tokenizer is not None:
        stops |= ends_next_to(served.tokenizer)
    base = replace(served, stop_token_ids=stops)
    # on Slurm, nodes resolve each other's Slurm names
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname()) if host in _WILDCARDS else host
    with listener_at(host, port) as listener:
        address = f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}"
        with linked(Setup(base, folder, token, store.lock, listener.fileno())) as link:
            with disk_faults(f"write {folder}"):
                content = {"address": address, "model": base.name, "slurm_job": os.environ.get("SLURM_JOB_ID")}
                write_atomically(folder / "service.json", json.dumps(content))
            _log.info(f"serving {base.name} at {address}")
            yield link
