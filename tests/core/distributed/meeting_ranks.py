"""Processes that open a world as `mtrain train` does, each with an environment of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from mtrain.base.environment import RankEnvironment
from mtrain.base.errors import MtrainError
from mtrain.core.ranks.init import init_distributed
from mtrain.core.ranks.party import Purpose

DEADLINE_S = 120.0


class Came(NamedTuple):
    """How opening a world ended for a process."""

    met: int
    """Sum of 2**rank over the ranks of its world; 0 where it got none."""
    exit_code: int
    text: str
    """The message; empty where it met the others, or where another rank shows it."""


class Rank:
    """A started process that opens a world."""

    def __init__(
        self, environ: Mapping[str, str], purpose: Purpose, timeout_s: float = 60.0, num_worlds: int = 1
    ) -> None:
        """Starts the process.

        Args:
            environ: Variables added to those of this process.
            purpose: Purpose of its world.
            timeout_s: Seconds that it waits for others.
            num_worlds: Number of worlds it opens, one after the other.
        """
        context = multiprocessing.get_context("forkserver")
        self._here, there = context.Pipe()
        job = (there, dict(environ), purpose.work, str(purpose.folder), dict(purpose.agreed), timeout_s, num_worlds)
        self.process = context.Process(target=_open, args=job, daemon=True)
        self.process.start()
        there.close()

    def came(self) -> Came:
        """Waits for the result."""
        assert self._here.poll(DEADLINE_S), "it hangs"
        found = Came(*json.loads(self._here.recv()))
        self.process.join()
        return found


def _open(
    out: Connection,
    environ: Mapping[str, str],
    work: str,
    folder: str,
    agreed: Mapping[str, str],
    timeout_s: float,
    num_worlds: int,
) -> None:
    os.environ.update(environ)
    sys.path[:0] = [path for path in environ.get("PYTHONPATH", "").split(":") if path]
    torch.set_num_threads(1)
    met = Came(0, 0, "")
    try:
        for _ in range(num_worlds):
            with init_distributed(
                RankEnvironment.from_environ(os.environ), "cpu", timeout_s, Purpose(work, Path(folder), agreed)
            ):
                total = torch.tensor([2.0 ** dist.get_rank()])
                dist.all_reduce(total)
                met = Came(int(total.item()), 0, "")
    except MtrainError as error:
        met = Came(0, error.exit_code, "" if error.is_shown_elsewhere else str(error))
    out.send(json.dumps(met))


class AgentStore:
    """A store that outlives ranks, like that of torchrun's agent."""

    def __init__(self) -> None:
        self._store: Any = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.environ = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GROUP_RANK": "0",
        }
        """Environment variables that name the store."""

    def wait_for(self, rank: int, number: int) -> None:
        """Waits until the rank waits for others in the meeting of that number."""
        key = f"mtrain/{number}/rank-{rank}"
        self._store.wait([key], timedelta(seconds=DEADLINE_S))
