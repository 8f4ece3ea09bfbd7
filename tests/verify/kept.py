"""Ranks that stay for the next call: a check of one step ends sooner than fresh ranks are ready.

For checks that build everything anew and leave nothing but models of a few kilobytes (what tests/pool.py says of
kept ranks is of groups: here they are opened once). A rank that fails takes those of its layout down; the next call
starts fresh ones.
"""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

from mtrain.arch.layout import Layout
from mtrain.core.ranks.groups import Groups, seed_generators
from tests import pool

MAX_LAYOUTS = 8
"""Number of layouts that are kept at a time."""
TIMEOUT_S = 600
LIFE_S = 24 * 3600
"""Timeout of the ranks, longer than any suite: they wait for calls, not for each other."""


def serve(groups: Groups, pipes: Sequence[Connection]) -> None:
    """Answers one call after the other, each from the same random states, until a call is None."""
    pipe = pipes[groups.rank]
    while (call := pickle.loads(pipe.recv_bytes())) is not None:
        function, arguments, seed = call
        seed_generators(seed, 0, groups)
        pipe.send_bytes(pickle.dumps(function(groups, *arguments)))
        gc.collect()
        gc.freeze()  # what megatron-core's hooks hold to the end is no garbage and need not be scanned


class _World:
    """The ranks of one layout."""

    def __init__(self, start: Callable[..., list[Any]], layout: Layout) -> None:
        ends = [Pipe() for _ in range(layout.world_size)]
        self._pipes = [here for here, _ in ends]
        self._ended: Future[list[Any]] = Future()
        job = (start, serve, layout, [there for _, there in ends])
        threading.Thread(target=self._watch, args=job, daemon=True).start()
        self.lock, self.has_ended = threading.Lock(), False

    def _watch(self, start: Callable[..., list[Any]], *job: Any) -> None:
        try:
            self._ended.set_result(start(*job))
        except BaseException as fault:
            self._ended.set_exception(fault)

    def run(self, call: tuple[Any, ...]) -> list[Any]:
        """Returns the answers of all ranks; raises what a rank raised."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(call))
        found: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(found) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            ready = wait(list(waiting), timeout=0.5)
            for pipe in (each for each in waiting if each in ready):
                try:
                    found[waiting[pipe]] = pickle.loads(pipe.recv_bytes())
                except EOFError:  # its process has ended, and the others soon will
                    self._ended.result(TIMEOUT_S)
            if self._ended.done():
                self._ended.result()
            if time.monotonic() > deadline:
                raise pool.RankFailed(f"ranks {sorted(waiting.values())} did not answer within {TIMEOUT_S} s")
        return [found[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(None))
        wait_for([self._ended])


class KeptPool(pool.Pool):
    """Keeps the ranks of the layouts that were used last."""

    def __init__(self) -> None:
        super().__init__()
        self._timeout_s = LIFE_S
        self._worlds: OrderedDict[str, _World] = OrderedDict()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for world in self._worlds.values():
            world.close()

    def run(self, function: Callable[..., Any], layout: Layout, *arguments: Any, seed: int = 1234) -> list[Any]:
        """Runs a function like the pool of the suite."""
        if function.__name__ in pool.REFERENCES:
            return super().run(function, layout, *arguments, seed=seed)
        while True:
            world = self._world(layout)
            with world.lock:
                if world.has_ended:  # by a call that this one waited for
                    continue
                try:
                    return world.run((function, arguments, seed))
                except BaseException:
                    with self._lock:
                        self._forget(world)
                    raise

    def _world(self, layout: Layout) -> _World:
        with self._lock:
            name = repr(layout)
            world = self._worlds.get(name) or _World(super().run, layout)
            self._worlds[name] = world
            self._worlds.move_to_end(name)
            others = [each for each in self._worlds.values() if each is not world]
            for each in others[: max(0, len(self._worlds) - MAX_LAYOUTS)]:
                if each.lock.acquire(blocking=False):  # else it is busy
                    self._forget(each)
                    each.close()
                    each.lock.release()
            return world

    def _forget(self, world: _World) -> None:
        world.has_ended = True
        self._worlds = OrderedDict((name, each) for name, each in self._worlds.items() if each is not world)
