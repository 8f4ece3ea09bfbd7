"""What ranks do in the tests of streamed weights."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from mtrain import ConfigError, Datum, Engine, receive_hf_tensors
from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from tests.training.engine_ranks import free


class Streamed(NamedTuple):
    """(name, dtype, bytes) of each tensor, in the order in which they came."""

    everywhere: list[Any]
    """Tensors streamed one parameter at a time."""
    on_first: list[Any]
    """Tensors streamed all at once."""
    received: list[Any]
    """Tensors received by another process; on rank 0."""
    num_bytes: int


def streamed_and_exported(groups: Groups, config: Config, folder: str) -> Streamed:
    """Streams the weights after a step in every way, and exports them into a folder."""
    with free(groups), Engine(config) as engine:
        engine.forward_backward([Datum(range(1, 9))] * 4)
        engine.optim_step(lr=0.1)
        everywhere = _bits(engine.named_hf_tensors(bucket_bytes=1))
        on_first = _bits(engine.named_hf_tensors(everywhere=False))
        received: list[Any] = []
        sender = None
        if engine.rank == 0:
            sender, receiver = group_pair()
            thread = threading.Thread(target=lambda: received.extend(_bits(receive_hf_tensors(receiver))))
            thread.start()
        num_bytes = engine.broadcast_hf_tensors(sender, bucket_bytes=5000)
        if engine.rank == 0:
            thread.join()
        with pytest.raises(ConfigError, match="rank 0 sends the weights, but its group is None"):
            engine.broadcast_hf_tensors(None)
        with pytest.raises(ConfigError, match="the configuration has no adapter section"):
            engine.named_hf_tensors("adapter")
        with pytest.raises(ValueError, match="content is 'lora', but must be one of merged, base, adapter"):
            engine.named_hf_tensors("lora")  # type: ignore[arg-type]
        engine.export_hf(folder)
        return Streamed(everywhere, on_first, received, num_bytes)


def _bits(named: Any) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    return [(name, str(each.dtype), tuple(each.shape), bits_of(each)) for name, each in named]


def bits_of(values: Tensor) -> bytes:
    """Returns the bytes of a tensor, in the order of a file."""
    return values.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def group_pair() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Returns both ends of a group outside torch.distributed's own world, as RL frameworks open one."""
    store = HashStore()
    found: list[Any] = [None, None]

    def opened(rank: int) -> None:
        group = dist.ProcessGroup(store, rank, 2)
        backend = dist.ProcessGroupGloo(store, rank, 2, timedelta(minutes=10))
        kind = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, backend)
        found[rank] = group

    other = threading.Thread(target=opened, args=(1,))  # each end waits for the other
    other.start()
    opened(0)
    other.join()
    return found[0], found[1]
