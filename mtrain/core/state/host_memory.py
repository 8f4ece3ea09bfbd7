"""Host memory for copies to and from a device, and the stream on which the copies run."""

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

PIECE_BYTES = 2**21
"""Size of a piece; copying it takes ten times as long as launching the copy."""
_PIECES_AT_ONCE = 32
"""Number of pieces to pin at once: 64 MiB."""


class HostBlocks:
    """Allocates host memory in blocks: pinned if `is_pinned`, but pageable, after one warning, once the driver refuses
    to pin."""

    def __init__(self, is_pinned: bool, purpose: str) -> None:
        self._is_pinned, self._purpose = is_pinned, purpose

    def block(self, size_bytes: int) -> Tensor:
        """Returns [size_bytes] uint8. Keep the block, not just views, since pinned memory is released with it."""
        if not self._is_pinned:
            return torch.empty(size_bytes, dtype=torch.uint8)
        memory = pinned_memory(size_bytes, self._purpose)
        self._is_pinned = memory.is_pinned()
        return memory


class HostMemory:
    """A pool of pieces of one size, since the memory needed changes from step to step with the tokens of each expert.
    Pinned if a GPU copies. The pool grows when it runs out of pieces, and never shrinks."""

    def __init__(self, is_pinned: bool) -> None:
        """Creates an empty pool; allocates no memory."""
        self._source = HostBlocks(is_pinned, "moved activations")
        self._blocks: list[Tensor] = []
        self._free: list[Tensor] = []

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of all pieces."""
        return sum(block.nbytes for block in self._blocks)

    def take(self, size_bytes: int) -> list[Tensor]:
        """Returns pieces, [PIECE_BYTES] uint8 each, that together hold `size_bytes`."""
        count = -(-size_bytes // PIECE_BYTES)
        while len(self._free) < count:
            self._grow()
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pieces: list[Tensor]) -> None:
        """Returns pieces to the pool; copies started from now on may overwrite them."""
        self._free += pieces

    def _grow(self) -> None:
        memory = self._source.block(PIECE_BYTES * _PIECES_AT_ONCE)
        self._blocks.append(memory)
        self._free += torch.split(memory, PIECE_BYTES)


class CopyStream:
    """Runs copies in the order of requests, concurrently with computation on the device; at once on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Makes copies inside the block begin after all earlier work of the device. Allocate tensors outside of it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def moment(self) -> Any:
        """Returns an event for the completion of all copies so far; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, moment: Any) -> None:
        """Makes later work of the device wait for an event of `moment`; the host continues."""
        if moment is not None:
            torch.cuda.current_stream().wait_event(moment)


def copy_to_host(values: Tensor, pieces: list[Tensor]) -> None:
    """Copies a contiguous 1-D tensor to the host, without waiting if the pieces are pinned."""
    for part, piece in _parts(values, pieces):
        piece.copy_(part, non_blocking=True)


def copy_from_host(pieces: list[Tensor], values: Tensor) -> None:
    """Copies pieces of the host back to a contiguous 1-D tensor, without waiting if the pieces are pinned."""
    for part, piece in _parts(values, pieces):
        part.copy_(piece, non_blocking=True)


def _parts(values: Tensor, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for part, piece in zip(torch.split(values.view(torch.uint8), PIECE_BYTES), pieces, strict=True):
        yield part, piece[: len(part)]


def pinned_memory(size_bytes: int, purpose: str) -> torch.Tensor:
    """Returns host memory for asynchronous copies from a GPU, [size_bytes] uint8; pageable memory, with a warning that
    names the purpose, if the driver refuses to pin it.

    torch allocates pinned memory in powers of two: 128 GiB for a rank with 70 GiB of state. Therefore pageable memory
    of the exact size is allocated and pinned here, and unpinned before it is freed.
    """
    memory = torch.empty(size_bytes, dtype=torch.uint8)
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if size_bytes == 0:
        return memory
    fault = int(driver.cudaHostRegister(memory.data_ptr(), size_bytes, 0))
    if fault:
        _log.warning(
            f"warning: {size_bytes / 2**30:.1f} GiB for {purpose} could not be pinned (CUDA error {fault}); training "
            "waits for each copy"
        )
    else:
        # not at exit, when the driver is already gone
        weakref.finalize(memory, driver.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory
