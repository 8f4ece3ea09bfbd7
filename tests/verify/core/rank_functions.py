"""What ranks do in the tests of the pool."""

import os
import signal
import time
from multiprocessing import RLock
from multiprocessing.util import Finalize
from typing import Any

import torch

from mtrain.base.errors import NumericError
from mtrain.config import Config
from mtrain.core.layers.build import build_chunks
from mtrain.core.layers.init_weights import sharded_tensors
from mtrain.core.layers.layer_spec import global_name
from mtrain.core.ranks.groups import Groups
from mtrain.verify.core.weights import drawn as drawn_weights

_locks: list[Any] = []


def coordinates(groups: Groups) -> tuple[int, int, int, int]:
    return groups.tp_rank, groups.cp_rank, groups.dp_rank, groups.pp_rank


def tensor(groups: Groups, value: float) -> torch.Tensor:
    return torch.full((3,), value + groups.rank)


def fail(groups: Groups, how: str) -> Any:
    """Raises an error or dies on rank 1."""
    if groups.rank == 1:
        match how:
            case "ours":
                raise NumericError("the loss is nan")
            case "foreign":
                raise ZeroDivisionError("seven by zero")
            case _:
                os.kill(os.getpid(), signal.SIGKILL)
    return groups.rank


def process(groups: Groups) -> int:
    return os.getpid()


def lock(groups: Groups) -> str:
    """Creates a lock that lives as long as the process, as tqdm does, which takes a moment to end.

    Returns the file of its semaphore.
    """
    _locks.append(RLock())
    Finalize(None, time.sleep, (0.2,), exitpriority=1)  # before the lock's, whose priority is 0
    return f"/dev/shm/sem.{_locks[-1]._semlock.name[1:]}"


def drawn(groups: Groups) -> float:
    """Returns a number from the generator of dropout."""
    return float(torch.rand(()))


def gains_off_one(groups: Groups, config: Config) -> dict[str, float]:
    """Returns for each norm how far the mean of its drawn weights is from that of a new model, whose gains are 1."""
    found = {}
    _, chunks = build_chunks(config, groups)
    for chunk in chunks:
        for part in sharded_tensors(chunk, groups):
            axes = part.prepend_axis_num
            name = global_name(part.key, tuple(part.global_offset[:axes]))
            if name.endswith("norm.weight"):
                values = drawn_weights(name, part.global_shape[axes:], config)
                found[name] = float(values.mean() - part.data.detach().float().mean())
    return found


def die_once_there(groups: Groups, path: str) -> None:
    """Ends rank 0 once the file exists; the others wait for rank 0."""
    while not os.path.exists(path):
        time.sleep(0.01)
    if groups.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def uses_it() -> None:
    """Ends well, as what uses CUDA where a fork can."""


def cannot_use_it() -> None:
    """Ends as what uses CUDA where a fork cannot."""
    raise SystemExit(1)


def work_for(groups: Groups, seconds: float) -> bool:
    """Uses a processor for some seconds of its time."""
    while time.process_time() < seconds:
        sum(range(10_000))
    return True


def sleep_for(groups: Groups, seconds: float) -> None:
    time.sleep(seconds)
