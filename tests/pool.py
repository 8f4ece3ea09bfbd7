"""Ranks for tests: real processes on gloo that need not import megatron-core each.

A fork server imports megatron-core once. For every call of `Pool.run` it forks fresh ranks, which open a gloo world and
the groups of a layout, call a function and end: 20 ms a rank. So no test sees what another left behind, and a rank that
raises or hangs takes only its own call down. (Kept ranks leak: the hooks of megatron-core's DDP tie each model to its
process groups in a cycle through autograd that Python cannot collect, 6 threads and 12 open files a group.)
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from mtrain.layout import Layout

TIMEOUT_S = 120
_PRELOADED = ["pytest", "numpy", "mtrain.mcore", "mtrain.step", "torch._dynamo", "tests.pool"]


class RankFailed(AssertionError):  # noqa: N818 - not an error of its own: a failed assertion, on a rank
    """A rank raised, died or hung; carries its traceback."""


class Pool:
    """Starts ranks; at most one call runs at a time."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)

    def run(self, function: Callable[..., Any], layout: Layout, *arguments: Any, seed: int = 1234) -> list[Any]:
        """`function(groups, *arguments)` on each rank of the layout; results by rank.

        Args:
            function: Importable under its name: it lives in a module that is not a test file.
            layout: Decides the number of ranks.
            *arguments: Pickled to every rank; tensors are better sent as numpy arrays.
            seed: Of megatron-core's RNG tracker.

        Raises:
            RankFailed: A rank raised, died or did not answer in time.
        """
        with tempfile.TemporaryDirectory(prefix="mtrain-pool-") as folder, _Ranks() as ranks:
            job = (function, layout, arguments, seed, os.path.join(folder, "store"))
            for rank in range(layout.world_size):
                ranks.start(self._context, (*job, rank))
            return ranks.results()


class _Ranks:
    """The processes of one call; none survives the `with` block."""

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.kill()
        for process in self._processes:
            process.join()

    def start(self, context: Any, job: tuple[Any, ...]) -> None:
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, job), daemon=True)
        process.start()
        there.close()
        self._processes.append(process)
        self._pipes.append(here)

    def results(self) -> list[Any]:
        """One a rank; raises the first failure."""
        found: dict[int, Any] = {}
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + TIMEOUT_S
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(waiting.values())} did not answer within {TIMEOUT_S} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                found[rank] = self._result(rank)
        return [found[rank] for rank in range(len(self._pipes))]

    def _result(self, rank: int) -> Any:
        try:
            succeeded, value = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join()
            raise RankFailed(f"rank {rank} died with exit code {self._processes[rank].exitcode}") from None
        if not succeeded:
            raise RankFailed(f"rank {rank}: {value}")
        return value


def _serve(pipe: Connection, job: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        answer = (True, _call(*job))
    except BaseException:  # whatever it is, the test has to show it
        answer = (False, traceback.format_exc())
    pipe.send(answer)


def _call(function: Callable[..., Any], layout: Layout, arguments: Any, seed: int, store: str, rank: int) -> Any:
    import torch
    import torch.distributed as dist

    from mtrain.mcore.groups import close_groups, open_groups

    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        groups = open_groups(layout, torch.device("cpu"), seed, TIMEOUT_S)
        try:
            return function(groups, *arguments)
        finally:
            close_groups()
    finally:
        dist.destroy_process_group()
