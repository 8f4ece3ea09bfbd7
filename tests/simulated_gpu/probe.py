"""Operations with known behaviour on a GPU: the test of the simulated device itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.simulated_gpu.tensors import DEVICE, SimulatedGpu
from tests.simulated_gpu.transfers import begin_step, found

_STEP = 1


def probed() -> dict[str, Any]:
    """Returns the operations that were refused, and those that were noted: kind and number."""
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    with SimulatedGpu():
        values, host, hosts = torch.arange(6.0, device=DEVICE), torch.arange(6.0), dist.new_group(backend="gloo")
        refusals: dict[str, Callable[[], Any]] = {
            "a tensor of the CPU in a collective": lambda: dist.all_reduce(host),
            "a strided tensor in a collective": lambda: dist.all_reduce(values.view(2, 3).t()),
            "tensors of two devices in one operation": lambda: values + host,
            "a number of the CPU with a tensor": lambda: values + torch.tensor(1.0),
            "a tensor of the GPU in a collective": lambda: dist.all_reduce(values),
            "a tensor of the GPU in a collective of hosts": lambda: dist.all_reduce(values, group=hosts),
            "a tensor of the CPU in a collective of hosts": lambda: dist.all_reduce(host, group=hosts),
        }
        refused = [name for name, call in refusals.items() if _is_refused(call)]
        begin_step(_STEP)
        _reads(values)
        _copies(values, host)
        begin_step(0)
    dist.destroy_process_group()
    counts: Counter[str] = Counter()
    for kind, _, count in found()[_STEP]:
        counts[kind] += count
    return {"refused": refused, "noted": list(counts.items())}


def _is_refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except RuntimeError:
        return True
    return False


def _reads(values: torch.Tensor) -> None:
    """Reads nine values, and waits twice."""
    values.sum().item()
    values.tolist()
    values.cpu()
    bool(values[0] == 0)
    torch.nonzero(values)
    values.masked_select(values > 2)
    values[values > 2]
    values.repeat_interleave(torch.ones(6, dtype=torch.int64, device=DEVICE))
    host = torch.empty(6)
    host.copy_(values, non_blocking=True)  # into memory that is not pinned
    torch.cuda.synchronize()
    torch.cuda.Event().synchronize()
    # the host does not wait for any of these
    values[values > 2] = 0
    values.repeat_interleave(torch.ones(6, dtype=torch.int64, device=DEVICE), output_size=6)
    (values * 2).sort()
    values[0] = 3.0


def _copies(values: torch.Tensor, host: torch.Tensor) -> None:
    """Makes four copies that the host waits for, and three that it does not."""
    torch.tensor([1.0, 2.0], device=DEVICE)
    host.to(DEVICE)
    host.to(DEVICE, non_blocking=True)
    values[torch.tensor([0, 2])]  # the index is copied to the device
    host.pin_memory().to(DEVICE, non_blocking=True)
    host.pin_memory()[2:].to(DEVICE, non_blocking=True)
    values.to("cpu", non_blocking=True)
