"""Ranks for tests: processes that have imported megatron-core once and are kept for the whole session.

A fork server imports megatron-core; the ranks are forked from it. `Pool.run` opens a gloo world and the groups of a
layout, calls a function on every rank and returns the results. A rank that raises or hangs takes the pool down; the
next call forks a new one.
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
from typing import Any

from mtrain.layout import Layout

TIMEOUT_S = 120


class RankFailed(AssertionError):
    """A rank raised; carries its traceback."""


class Pool:
    """Up to eight ranks."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["mtrain.mcore", "mtrain.step", "tests.pool"])
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], layout: Layout, *arguments: Any, seed: int = 1234) -> list[Any]:
        """`function(groups, *arguments)` on each rank of the layout; results by rank."""
        world_size = layout.world_size
        while len(self._ranks) < world_size:
            self._start_rank()
        with tempfile.TemporaryDirectory(prefix="mtrain-pool-") as folder:
            store = os.path.join(folder, "store")
            for rank, (_, pipe) in enumerate(self._ranks[:world_size]):
                pipe.send((function, layout, arguments, seed, rank, store))
            return self._collect(world_size)

    def _collect(self, world_size: int) -> list[Any]:
        results: dict[int, Any] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:world_size])}
        deadline = time.monotonic() + TIMEOUT_S
        while pipes:
            ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise RankFailed(f"ranks {sorted(pipes.values())} did not answer within {TIMEOUT_S} s")
            for pipe in ready:
                rank = pipes.pop(pipe)  # type: ignore[arg-type]
                try:
                    succeeded, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    succeeded, value = False, "the process died"
                if not succeeded:
                    self.close()
                    raise RankFailed(f"rank {rank}: {value}")
                results[rank] = value
        return [results[rank] for rank in range(world_size)]

    def _start_rank(self) -> None:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        there.close()
        self._ranks.append((process, here))

    def close(self) -> None:
        """Ends all ranks."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, layout, arguments, seed, rank, store = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, _call(function, layout, arguments, seed, rank, store)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _call(function: Callable[..., Any], layout: Layout, arguments: Any, seed: int, rank: int, store: str) -> Any:
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
