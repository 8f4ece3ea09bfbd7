"""What ranks do in the tests of the service; the functions for `Pool.run`."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from mtrain.config import Config
from mtrain.mcore.distributed.groups import Groups
from mtrain.serve.run import serve
from mtrain.serve.work import Served
from tests.training.engine_ranks import free


def served(groups: Groups, config: Config, stop: str) -> None:
    """Serves until there is a file `stop`."""
    if groups.rank == 0:
        threading.Thread(target=_ended, args=(Path(stop),), daemon=True).start()
    with free(groups):
        serve(Served(config), "127.0.0.1", 0, None)


def _ended(stop: Path) -> None:
    while not stop.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
