"""A copy of what is to be saved, so that training goes on while it is written."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from mtrain.checkpoint.format.writer import Shard

# A cache line, and a multiple of every dtype's size: no element is unaligned.
_ALIGNMENT_BYTES = 64


class Snapshot:
    """Memory on the host that is used again for each save; pinned where the state lies on a GPU."""

    def __init__(self) -> None:
        """No memory is taken yet."""
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def size_bytes(self) -> int:
        """Of the memory."""
        return self._buffer.nbytes

    def take(self, shards: Sequence[Shard]) -> list[Shard]:
        """Copies all shards; when it returns they may change.

        The copies are overwritten by the next call.
        """
        sizes = [-(-shard.data.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for shard in shards]
        # into memory that is not pinned, a copy from a GPU is not asynchronous
        on_gpu = any(shard.data.is_cuda for shard in shards)
        # grows and never shrinks: fresh pages cost several times the copy (docs/checkpoints.md, first save)
        if sum(sizes) > self._buffer.nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # let go of the old one first
            self._buffer = (
                pinned_memory(sum(sizes), "snapshots") if on_gpu else torch.empty(sum(sizes), dtype=torch.uint8)
            )
        # numpy's slices hold the buffer alive as long as a copy is in use
        memory, start, copies = self._buffer.numpy(), 0, list[Shard]()
        for shard, size in zip(shards, sizes, strict=True):
            place = memory[start : start + shard.data.nbytes]
            copy = torch.frombuffer(place, dtype=shard.data.dtype) if shard.data.numel() else shard.data.detach().cpu()
            # the same stream as training: the copy comes after the update that was queued before it
            copy.copy_(shard.data.detach().flatten(), non_blocking=on_gpu)
            copies.append(shard._replace(data=copy))
            start += size
        if on_gpu:
            # the caller trains on and changes the state as soon as this returns
            torch.cuda.current_stream().synchronize()
        return copies


def pinned_memory(size_bytes: int, purpose: str) -> torch.Tensor:
    """Memory on the host to which a GPU copies by itself; plain memory, and a warning, where the driver refuses.

    torch's own pinned memory comes in powers of two: of 70 GiB for a state each rank would take 128. So plain memory of
    the very size is taken and pinned here, and given back to the driver before it is freed.

    Args:
        size_bytes: Of the memory.
        purpose: What it is for, in a warning: snapshots, for instance.

    Returns:
        [size_bytes] uint8.
    """
    memory = torch.empty(size_bytes, dtype=torch.uint8)
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if size_bytes == 0:
        return memory
    fault = int(driver.cudaHostRegister(memory.data_ptr(), size_bytes, 0))
    if fault:
        print(
            f"warning: {size_bytes / 2**30:.1f} GiB for {purpose} could not be pinned (CUDA error {fault}); training "
            "waits for each copy",
            file=sys.stderr,
            flush=True,
        )
    else:
        # where the process ends, the driver ends with it
        weakref.finalize(memory, driver.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory
