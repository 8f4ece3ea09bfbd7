"""What ranks do in the tests of lost ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mtrain.base import fault_points
from mtrain.base.signals import StopSignal
from mtrain.config import Config
from mtrain.core.ranks import patience
from mtrain.core.ranks.groups import Groups, opened_groups
from mtrain.training.trainer import train_on


def with_short_timeouts(
    groups: Groups,
    store: str,
    timeout_s: float,
    action: Callable[[Groups], object],
    device: str = "cpu",
    by_awake_clock: bool = False,
) -> None:
    """Runs the action on the same ranks in a new world; `store` is a file that does not exist yet."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    timeout = timedelta(seconds=timeout_s)
    patience.install()
    with patience.limited(timeout_s) if by_awake_clock else contextlib.nullcontext():
        with patience.opening():
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
        with opened_groups(groups.layout, torch.device(device), 1234, timeout_s) as again:
            action(again)


def train_with_fault(groups: Groups, config: Config, fault: fault_points.InjectedFault) -> None:
    """Trains a whole run in which one rank fails."""
    os.environ[fault_points.VARIABLE] = str(fault)
    store, timeout_s = f"{config.run.dir}.store", config.train.process_group_timeout_s
    with_short_timeouts(groups, store, timeout_s, lambda again: train_on(again, config, StopSignal()))


class Waited(NamedTuple):
    """One call of one group that the other ranks did not join."""

    group: str
    call: str
    seconds: float


def wait_in_vain(groups: Groups, store: str, timeout_s: float, by_awake_clock: bool) -> list[Waited]:
    """Starts two calls on rank 0 in every group of more than one rank, all at once, and waits; the others join none."""
    waited: list[Waited] = []
    ended = Path(f"{store}.ended")

    def action(_: Groups) -> None:
        if dist.get_rank() != 0:
            while not ended.exists():
                time.sleep(0.1)
            return
        began = time.monotonic()
        for name, call, work in list(_begun()):
            try:
                work.wait()
            except RuntimeError:
                waited.append(Waited(name, call, time.monotonic() - began))
        ended.touch()

    # no CPU, so that hosts have a group of their own
    with_short_timeouts(groups, store, timeout_s, action, device="meta", by_awake_clock=by_awake_clock)
    return waited


def _begun() -> Iterator[tuple[str, str, Any]]:
    for group in dist.distributed_c10d._world.pg_map:
        if dist.get_world_size(group) > 1:
            yield group.group_desc, "receive", dist.irecv(torch.zeros(1), group=group, group_src=1)
            yield group.group_desc, "all-reduce", dist.all_reduce(torch.zeros(1), group=group, async_op=True)
