"""Ranks on this machine: processes that open a process group, call one function and end.

A fork server imports megatron-core once, and every call forks fresh ranks from it in 20 ms each: on CPUs over gloo, on
GPUs one per GPU over NCCL. Calls share no state, and a rank that raises or hangs affects only its own call. Ranks are
not reused because they leak: hooks of megatron-core's DDP tie each model to its process groups in an autograd cycle
that Python cannot collect, with 6 threads and 12 open files per group. A process that has called CUDA's driver cannot
be forked: if a package does so at import, ranks on GPUs are spawned, which repeats all imports (15 s and more).
"""

import gc
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from signal import strsignal
from typing import Any, NamedTuple

import psutil

from mtrain.arch.layout import Layout
from mtrain.base.environment import program_versions
from mtrain.base.errors import MtrainError, UnfinishedError, reason_of
from mtrain.base.log import show_lines
from mtrain.base.signals import interrupts_blocked, was_interrupted
from mtrain.verify.core.result import LayoutResult, summary

TIMEOUT_S = 120
_POLL_S = 1.0
_END_S = 5.0
"""Longest wait for ranks that have answered."""
_LEAST_SHARE = 0.01
"""Smallest share of one processor that all working ranks use together; waiting ranks only poll a file."""
_GROUP_TIMEOUT_S = 1800
"""Longest wait in a collective, in seconds: on a GPU waiting uses a processor, so `Patience` does not see a hang."""
_PRELOADED = (
    "numpy",
    "mtrain.core.ranks",
    "mtrain.core.step.step",
    "mtrain.data.loader",
    "torch._dynamo",
    "mtrain.verify.core.ranks",
)


class RankFailedError(UnfinishedError):
    """A rank raised, died or hung: one line; a note holds its traceback."""


def environment_of(device: str) -> dict[str, str]:
    """Returns versions, device and backend of the ranks, for a report."""
    return {**program_versions(), "device": device, "backend": "gloo" if device == "cpu" else "nccl"}


def failure(error: Exception) -> dict[str, Any]:
    """Returns the fields of a `LayoutResult` that say why it did not finish."""
    if was_interrupted():  # a library raised this error instead
        raise KeyboardInterrupt from None
    code = code_of(error)
    is_foreseen = code != UnfinishedError.exit_code  # the user can act on it
    trace = None if is_foreseen else "".join(traceback.format_exception(error))
    return {"error": reason_of(error), "trace": trace, "exit_code": code}


def attempted(name: str, axes: dict[str, str], num_ranks: int, find: Callable[[], Mapping[str, Any]]) -> LayoutResult:
    """Returns the result with the fields that `find` computes, or with the error that ended it."""
    began = time.monotonic()
    try:
        fields = find()
    except Exception as error:  # any error: the report has it, next to the other results
        fields = failure(error)
    return LayoutResult(name, axes, num_ranks, time.monotonic() - began, **fields)


def all_results(
    cases: Sequence[Callable[[], LayoutResult]], device: str, progress: Callable[[str], None]
) -> list[LayoutResult]:
    """Runs all cases, two at a time on CPUs, because ranks often wait for each other; reports each when it ends."""
    lock = threading.Lock()

    def run(case: Callable[[], LayoutResult]) -> LayoutResult:
        result = case()
        with lock:
            progress(summary(result))
        return result

    threads = ThreadPoolExecutor(max_workers=2 if device == "cpu" else 1)
    try:
        return list(threads.map(run, cases))
    finally:
        threads.shutdown(cancel_futures=True)  # an interrupted check starts no further case


def code_of(error: BaseException) -> int:
    """Returns the exit code of a check that ends with this error; never 0 or 1, the codes of a verdict."""
    code = error.exit_code if isinstance(error, MtrainError) else UnfinishedError.exit_code
    return code if code > 1 else UnfinishedError.exit_code


class Pool:
    """Starts ranks; at most one call runs at a time."""

    def __init__(
        self,
        device: str = "cpu",
        preloaded: Sequence[str] = (),
        timeout_s: float = TIMEOUT_S,
        is_deterministic: bool = False,
    ) -> None:
        """Chooses how ranks start; starts none.

        The fork server also imports the `preloaded` modules. `timeout_s` is the longest time for which no rank uses a
        processor; a call may take any time.
        """
        self.device, self._timeout_s, self._is_deterministic = device, timeout_s, is_deterministic
        self._forking: Any = multiprocessing.get_context("forkserver")
        self._forking.set_forkserver_preload([*_PRELOADED, *preloaded])

    def run(self, function: Callable[..., Any], layout: Layout, *arguments: Any, seed: int = 1234) -> list[Any]:
        """Calls `function(groups, *arguments)` on each rank of the layout; returns the results by rank.

        The function is imported by name, arguments are pickled: send tensors as numpy arrays. `seed` goes to
        megatron-core's RNG tracker.

        Raises:
            MtrainError: A rank raised this error.
            RankFailedError: A rank raised another error, died or hung.
        """
        ranks = _Ranks()
        with tempfile.TemporaryDirectory(prefix="mtrain-ranks-") as folder:
            store = os.path.join(folder, "store")
            job = _Job(function, layout, arguments, seed, self.device, self._is_deterministic, store, self._timeout_s)
            try:
                for rank in range(layout.world_size):
                    ranks.start(self._context, job, rank)
                results = ranks.results(self._timeout_s)
                ranks.wait()
                return results
            finally:
                ranks.end()

    @cached_property
    def _context(self) -> Any:
        """Multiprocessing context of the ranks; on GPUs, a trial fork first shows whether forked ranks can use CUDA."""
        if self.device == "cpu":
            return self._forking
        # by default torch looks for GPUs through CUDA's driver, after which no fork can use it; ranks inherit this
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        probe = self._forking.Process(target=_use_cuda, daemon=True)
        with interrupts_blocked():
            probe.start()
        probe.join()
        return self._forking if probe.exitcode == 0 else multiprocessing.get_context("spawn")


class _Job(NamedTuple):
    function: Callable[..., Any]
    layout: Layout
    arguments: tuple[Any, ...]
    seed: int
    device: str
    is_deterministic: bool
    store: str
    """Path of the rendezvous file."""
    timeout_s: float


class Patience:
    """Tells slow ranks from hung ones, which use no processor."""

    def __init__(self, timeout_s: float) -> None:
        """Starts with no sign of life; `timeout_s` is the longest time without work."""
        self._timeout_s = timeout_s
        self._since: tuple[float, float] | None = None
        """Time of the last sign of life, and the processor time used by then."""

    def has_ended(self, now_s: float, used_s: float) -> bool:
        """Says whether the ranks have been idle too long; `used_s` is the processor time of all ranks by `now_s`."""
        if self._since is None or abs(used_s - self._since[1]) >= _LEAST_SHARE * self._timeout_s:
            self._since = now_s, used_s
        return now_s - self._since[0] > self._timeout_s


class _Ranks:
    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def end(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.kill()
        for process in self._processes:
            process.join()

    def wait(self) -> None:
        """Waits until the ranks have ended on their own, which removes their locks; not for ranks that do not."""
        for process in self._processes:
            process.join(_END_S)

    def start(self, context: Any, job: _Job, rank: int) -> None:
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, job, rank), daemon=True)
        with interrupts_blocked():  # a terminal sends Ctrl-C to all processes; the caller ends the ranks
            process.start()
        there.close()
        self._processes.append(process)
        self._pipes.append(here)

    def results(self, timeout_s: float) -> list[Any]:
        """Waits for all results; raises the first failure."""
        results: dict[int, Any] = {}
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        patience = Patience(timeout_s)
        while waiting:
            ready = wait(list(waiting), timeout=min(_POLL_S, timeout_s))
            if not ready and patience.has_ended(time.monotonic(), self._used_s()):
                raise RankFailedError(
                    f"ranks {sorted(waiting.values())} have used no processor for {timeout_s:g} s and have not "
                    "responded"
                )
            for pipe in ready:
                rank = waiting.pop(pipe)
                results[rank] = self._result(rank)
        return [results[rank] for rank in range(len(self._pipes))]

    def _used_s(self) -> float:
        """Returns the processor time of all ranks and their child processes."""
        used = 0.0
        for process in self._processes:
            with suppress(psutil.Error):  # it has ended
                parent = psutil.Process(process.pid)
                used += sum(sum(member.cpu_times()[:2]) for member in (parent, *parent.children(recursive=True)))
        return used

    def _result(self, rank: int) -> Any:
        try:
            succeeded, value = pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            self._processes[rank].join()
            code = self._processes[rank].exitcode or 0
            cause = f" ({strsignal(-code)})" if code < 0 else ""
            raise RankFailedError(f"rank {rank} died with exit code {code}{cause}") from None
        if isinstance(value, MtrainError):
            raise value
        if not succeeded:
            reason, trace = value
            failed = RankFailedError(f"rank {rank}: {reason}")
            failed.add_note(trace)
            raise failed
        return value


def _use_cuda() -> None:
    import torch

    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        raise SystemExit(1) from error


def _serve(pipe: Connection, job: _Job, rank: int) -> None:
    import torch

    gc.freeze()  # modules that the fork server has imported are not garbage: collections need not scan them
    torch.set_num_threads(1)
    show_lines()
    try:
        from mtrain.core.ranks.deterministic import deterministic

        with deterministic(job.is_deterministic):
            answer = (True, _call(job, rank))
    except MtrainError as error:
        answer = (False, error)
    except BaseException as error:  # any error: the caller must show it
        answer = (False, (reason_of(error), traceback.format_exc()))
    # by value: multiprocessing would share a tensor's memory, which this process frees
    pipe.send_bytes(pickle.dumps(answer))


def _call(job: _Job, rank: int) -> Any:
    import torch
    import torch.distributed as dist

    from mtrain.core.ranks.groups import opened_groups

    device = torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")
    options: dict[str, Any] = {}
    timeout_s = max(job.timeout_s, _GROUP_TIMEOUT_S)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{job.store}",
        rank=rank,
        world_size=job.layout.world_size,
        timeout=timedelta(seconds=timeout_s),
        **options,
    )
    try:
        with opened_groups(job.layout, device, job.seed, timeout_s) as groups:
            return job.function(groups, *job.arguments)
    finally:
        dist.destroy_process_group()
