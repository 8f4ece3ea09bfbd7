"""What ranks do in the tests of the service; the functions for `Pool.run`."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from mtrain.config import Config
from mtrain.mcore.distributed.groups import Groups
from mtrain.serve.app import App
from mtrain.serve.asked import BaseModel
from mtrain.serve.desk import Desk, Sessions
from mtrain.serve.run import _work, serve
from mtrain.serve.store import Lora, Store
from mtrain.serve.work import CreateModel, Done, KeepSampler, Served, Unload, Worker
from tests.training.engine_ranks import free


def served(groups: Groups, config: Config, stop: str) -> None:
    """Serves until there is a file `stop`."""
    if groups.rank == 0:
        threading.Thread(target=_ended, args=(Path(stop),), daemon=True).start()
    with free(groups):
        serve(Served(config), "127.0.0.1", 0, None)


def shapes(groups: Groups, config: Config, folder: str) -> list[int]:
    """Counts the sets of adapters in addition to the first one, while models and samplers come and go."""
    found = []
    with free(groups):
        worker = Worker(Served(config), Store(Path(folder)))
        for operation in (
            CreateModel("a", Lora(2, 1)),
            CreateModel("b", Lora(3, 1)),
            CreateModel("c", Lora(4, 1)),
            KeepSampler("kept", "c"),
            Unload(("b", "c"), ()),
            Unload((), ("kept",)),
        ):
            assert isinstance(worker.run(operation), Done)
            found.append(len(worker._shapes))
        worker.close()
    return found


def broadcasts(groups: Groups, config: Config, folder: str) -> int:
    """Counts the broadcasts by which ranks agree on each of three calls, and on the end."""
    with free(groups), mock.patch.object(dist, "broadcast_object_list", wraps=dist.broadcast_object_list) as sent:
        worker, desk, sessions = Worker(Served(config), Store(Path(folder))), Desk(), Sessions(600)
        app = None
        if groups.rank == 0:
            app = App(BaseModel("base", 32, frozenset()), desk, sessions, Store(Path(folder)), None)
            last = [desk.submit(Unload((), ())) for _ in range(3)][-1]
            assert desk.listen(last, lambda: os.kill(os.getpid(), signal.SIGTERM))
        before = sent.call_count
        assert _work(worker, desk, sessions, app, 60) is signal.SIGTERM
        found = sent.call_count - before
        worker.close()
    return found


def _ended(stop: Path) -> None:
    while not stop.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
