"""Records when this rank waits for others: for the watchdog, and to know the time that a rank computes itself.

Every collective and every message of torch.distributed ends in `Work.wait`, of which each rank has one. On CPUs the
host waits there; on GPUs the stream does, and the host only where it reads a number.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from mtrain.base import pulse
from mtrain.mcore.distributed import patience

_waited_s = [0.0]
_plain_wait = Work.wait


def waited_s() -> float:
    """Returns the seconds that this process's host has waited for other ranks since it began."""
    return _waited_s[0]


@contextlib.contextmanager
def for_device(device: torch.device) -> Iterator[None]:
    """Records a wait inside the block: the host waits for a GPU, and so for its stream's ranks; on CPUs it works."""
    began = time.perf_counter()
    yield
    if device.type != "cpu":
        _waited_s[0] += time.perf_counter() - began


def install() -> None:
    """Records waits from now on; calling it again changes nothing. Costs a microsecond or two each."""
    works: Any = Work
    works.wait = _noted


def _noted(self: Work, *arguments: Any, **options: Any) -> Any:
    own, began = pulse.current(), time.perf_counter()
    kind = -1
    if own is not None:
        kind = self._get_op_type()  # type: ignore[attr-defined]
        own.begin_wait(kind)
    if (limit := patience.current()) is None:
        result = _plain_wait(self, *arguments, **options)
    else:
        result = limit.wait(_plain_wait, self, *arguments, **options)
    # not after an error: a wait that timed out is no progress, and shows where the rank is stuck
    _waited_s[0] += time.perf_counter() - began
    if own is not None:
        own.end_wait(kind)
    return result
