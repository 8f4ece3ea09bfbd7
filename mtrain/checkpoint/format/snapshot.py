"""Copy of the state to be saved, so that training goes on while it is written."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from mtrain.base.background import started
from mtrain.core.state.host_memory import pinned_memory
from mtrain.core.state.shard import Shard

_log = logging.getLogger(__name__)

# A cache line, and a multiple of every dtype's size: every element is aligned.
_ALIGNMENT_BYTES = 64


class Snapshot:
    """Host memory that is reused for each save; pinned where the state is on a GPU."""

    def __init__(self) -> None:
        """Creates a snapshot without memory."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._expected: Future[torch.Tensor] | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the memory, in bytes."""
        return self._buffer.nbytes

    def expect(self, shards: Sequence[Shard]) -> None:
        """Allocates the memory for such shards in a thread, so that the first copy need not wait for it.

        The system hands out memory page by page, at a fraction of the speed of a copy.
        """
        size_bytes, on_gpu = sum(map(_place_bytes, shards)), _is_on_gpu(shards)
        if self._expected is None and size_bytes > self._buffer.nbytes:
            self._expected = started(lambda: _touched(_memory(size_bytes, on_gpu)), "snapshot-memory")

    def take(self, shards: Sequence[Shard]) -> list[Shard]:
        """Copies all shards; when it returns the originals may change.

        The next call overwrites the copies.
        """
        if self._expected is not None:
            expected, self._expected = self._expected, None
            self._buffer = expected.result()
        sizes, on_gpu = [_place_bytes(shard) for shard in shards], _is_on_gpu(shards)
        # grows and never shrinks: fresh pages cost several times the copy (docs/weights/checkpoints.md, first save)
        if sum(sizes) > self._buffer.nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._buffer = _memory(sum(sizes), on_gpu)
        # numpy's slices keep the buffer alive as long as a copy is in use
        memory, start, copies = self._buffer.numpy(), 0, list[Shard]()
        for shard, size in zip(shards, sizes, strict=True):
            place = memory[start : start + shard.data.nbytes]
            copy = torch.frombuffer(place, dtype=shard.data.dtype) if shard.data.numel() else shard.data.detach().cpu()
            # the same stream as training: the copy comes after the update that was enqueued before it
            copy.copy_(shard.data.detach().flatten(), non_blocking=on_gpu)
            copies.append(shard._replace(data=copy))
            start += size
        if on_gpu:
            # the caller continues training and changes the state as soon as this returns
            torch.cuda.current_stream().synchronize()
        return copies


def _place_bytes(shard: Shard) -> int:
    return -(-shard.data.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _is_on_gpu(shards: Sequence[Shard]) -> bool:
    """Says whether to pin the memory: a copy from a GPU to pageable memory is not asynchronous."""
    return any(shard.data.is_cuda for shard in shards)


def _memory(size_bytes: int, on_gpu: bool) -> torch.Tensor:
    return pinned_memory(size_bytes, "snapshots") if on_gpu else torch.empty(size_bytes, dtype=torch.uint8)


def _touched(memory: torch.Tensor) -> torch.Tensor:
    """Writes to every page of the memory, so that the system has allocated all of it, and returns it."""
    # numpy releases the interpreter's lock while it writes, and has no threads that training would wait for
    memory.numpy()[:: mmap.PAGESIZE] = 0
    return memory
