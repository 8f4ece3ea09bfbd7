"""Ranks on this machine: real processes that open a process group, call one function and end.

A fork server imports megatron-core once, and every call forks fresh ranks from it, in 20 ms each: on CPUs over gloo, on
GPUs one per GPU over NCCL. So no call sees the state of another, and a rank that raises or hangs only affects its own
call. (Reused ranks leak: the hooks of megatron-core's DDP tie each model to its process groups in a cycle through
autograd that Python cannot collect, with 6 threads and 12 open files per group.) A process that has asked CUDA's driver
for anything cannot be forked: where a package does so when it is imported, ranks on GPUs are spawned, which takes as
long as all imports, 15 s and more.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, NamedTuple

from mtrain.base.environment import program_versions
from mtrain.base.errors import MtrainError
from mtrain.base.log import show_lines
from mtrain.base.signals import interrupts_blocked
from mtrain.plan.layout import Layout

TIMEOUT_S = 120
_PRELOADED = (
    "numpy",
    "mtrain.mcore",
    "mtrain.training.step",
    "mtrain.data.loader",
    "torch._dynamo",
    "mtrain.verify.core.ranks",
)


class RankFailedError(RuntimeError):
    """Failure of a rank that raised, died or hung; carries its traceback."""


def environment_of(device: str) -> dict[str, str]:
    """Returns versions, device and backend of the ranks, for a report."""
    return {**program_versions(), "device": device, "backend": "gloo" if device == "cpu" else "nccl"}


def reason_of(fault: RankFailedError | MtrainError) -> str:
    """Returns the reason of a failure in one line."""
    lines = str(fault).strip().splitlines()
    return lines[-1] if isinstance(fault, RankFailedError) else lines[0]


class Pool:
    """Starts ranks; at most one call runs at a time."""

    def __init__(
        self,
        device: str = "cpu",
        preloaded: Sequence[str] = (),
        timeout_s: int = TIMEOUT_S,
        is_deterministic: bool = False,
    ) -> None:
        """Chooses how ranks are started; starts none yet.

        Args:
            device: Kind of device: cpu, or cuda for one GPU per rank.
            preloaded: Further modules that the fork server imports.
            timeout_s: Longest time that a call may take, in seconds.
            is_deterministic: Value of `train.deterministic`.
        """
        self.device, self._timeout_s, self._is_deterministic = device, timeout_s, is_deterministic
        self._forking: Any = multiprocessing.get_context("forkserver")
        self._forking.set_forkserver_preload([*_PRELOADED, *preloaded])

    def run(self, function: Callable[..., Any], layout: Layout, *arguments: Any, seed: int = 1234) -> list[Any]:
        """Calls `function(groups, *arguments)` on each rank of the layout, and returns the results by rank.

        Args:
            function: Function that can be imported under its name.
            layout: Layout, which determines the number of ranks.
            *arguments: Arguments, pickled for every rank; tensors are better sent as numpy arrays.
            seed: Seed of megatron-core's RNG tracker.

        Raises:
            MtrainError: A rank raised this error.
            RankFailedError: A rank raised something else, died or did not answer in time.
        """
        with tempfile.TemporaryDirectory(prefix="mtrain-ranks-") as folder, _Ranks() as ranks:
            store = os.path.join(folder, "store")
            job = _Job(function, layout, arguments, seed, self.device, self._is_deterministic, store, self._timeout_s)
            for rank in range(layout.world_size):
                ranks.start(self._context, job, rank)
            return ranks.results(self._timeout_s)

    @cached_property
    def _context(self) -> Any:
        """Way in which ranks start; on GPUs forks are tried first, with one that uses CUDA."""
        if self.device == "cpu":
            return self._forking
        # by default torch looks for GPUs through CUDA's driver, which cannot be forked then; ranks inherit this
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        tried = self._forking.Process(target=_use_cuda, daemon=True)
        with interrupts_blocked():
            tried.start()
        tried.join()
        return self._forking if tried.exitcode == 0 else multiprocessing.get_context("spawn")


class _Job(NamedTuple):
    """Call that all ranks make."""

    function: Callable[..., Any]
    layout: Layout
    arguments: tuple[Any, ...]
    seed: int
    device: str
    """Kind of device: cpu or cuda."""
    is_deterministic: bool
    store: str
    """Path of the file over which the ranks meet."""
    timeout_s: int


class _Ranks:
    """Processes of one call; none survives the `with` block."""

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

    def start(self, context: Any, job: _Job, rank: int) -> None:
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, job, rank), daemon=True)
        with interrupts_blocked():  # a terminal sends Ctrl-C to all processes; the caller ends the ranks
            process.start()
        there.close()
        self._processes.append(process)
        self._pipes.append(here)

    def results(self, timeout_s: int) -> list[Any]:
        """Waits for the results of all ranks; raises the first failure."""
        found: dict[int, Any] = {}
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailedError(f"ranks {sorted(waiting.values())} did not answer within {timeout_s} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                found[rank] = self._result(rank)
        return [found[rank] for rank in range(len(self._pipes))]

    def _result(self, rank: int) -> Any:
        try:
            succeeded, value = pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            self._processes[rank].join()
            raise RankFailedError(f"rank {rank} died with exit code {self._processes[rank].exitcode}") from None
        if isinstance(value, MtrainError):
            raise value
        if not succeeded:
            raise RankFailedError(f"rank {rank}: {value}")
        return value


def _use_cuda() -> None:
    import torch

    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:  # the second where torch is built without CUDA
        raise SystemExit(1) from error


def _serve(pipe: Connection, job: _Job, rank: int) -> None:
    import torch

    gc.freeze()  # modules that the fork server has imported are not garbage: collections need not scan them
    torch.set_num_threads(1)
    show_lines()
    try:
        from mtrain.mcore.distributed.deterministic import deterministic

        with deterministic(job.is_deterministic):
            answer = (True, _call(job, rank))
    except MtrainError as error:
        answer = (False, error)
    except BaseException:  # of any kind: the caller has to show it
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))  # by value: multiprocessing would share a tensor's memory, which ends with us


def _call(job: _Job, rank: int) -> Any:
    import torch
    import torch.distributed as dist

    from mtrain.mcore.distributed.groups import opened_groups

    device = torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")
    options: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{job.store}",
        rank=rank,
        world_size=job.layout.world_size,
        timeout=timedelta(seconds=job.timeout_s),
        **options,
    )
    try:
        with opened_groups(job.layout, device, job.seed, job.timeout_s) as groups:
            return job.function(groups, *job.arguments)
    finally:
        dist.destroy_process_group()
