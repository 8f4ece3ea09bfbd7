"""Memory of the host for copies to and from a device, and the stream on which they run."""

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

PIECE_BYTES = 2**21
"""Size of a piece, whose copy takes ten times as long as its start."""
_PIECES_AT_ONCE = 32
"""Number of pieces that are pinned at a time: 64 MiB."""


class HostBlocks:
    """Memory of the host, block by block: pinned if wanted; plain, after one warning, once the driver refuses to
    pin."""

    def __init__(self, is_pinned: bool, purpose: str) -> None:
        self._is_pinned, self._purpose = is_pinned, purpose

    def block(self, size_bytes: int) -> Tensor:
        """Returns [size_bytes] uint8. Hold the block itself, not only views: pinned memory is released with it."""
        if not self._is_pinned:
            return torch.empty(size_bytes, dtype=torch.uint8)
        memory = pinned_memory(size_bytes, self._purpose)
        self._is_pinned = memory.is_pinned()
        return memory


class HostMemory:
    """Pieces of one size that are used again and again, as needs change from step to step with the tokens that experts
    get; pinned if a GPU copies. The memory grows when there are too few, and never shrinks."""

    def __init__(self, is_pinned: bool) -> None:
        """Creates an empty pool, without allocating memory."""
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
        """Gives pieces back; copies that are started from now on may overwrite them."""
        self._free += pieces

    def _grow(self) -> None:
        memory = self._source.block(PIECE_BYTES * _PIECES_AT_ONCE)
        self._blocks.append(memory)
        self._free += torch.split(memory, PIECE_BYTES)


class CopyStream:
    """Copies in the order of the requests, in parallel with the device's computation; at once on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Makes copies of the block begin when all earlier work of the device is done. Allocate outside of it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def moment(self) -> Any:
        """Returns the moment when the copies so far are done; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, moment: Any) -> None:
        """Makes the device's later work begin after `moment`; the host continues."""
        if moment is not None:
            torch.cuda.current_stream().wait_event(moment)


def copy_to_host(values: Tensor, pieces: list[Tensor]) -> None:
    """Copies a contiguous tensor of one axis to the host, without waiting if the pieces are pinned."""
    for part, piece in _parts(values, pieces):
        piece.copy_(part, non_blocking=True)


def copy_from_host(pieces: list[Tensor], values: Tensor) -> None:
    """Copies back from the host."""
    for part, piece in _parts(values, pieces):
        part.copy_(piece, non_blocking=True)


def _parts(values: Tensor, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for part, piece in zip(torch.split(values.view(torch.uint8), PIECE_BYTES), pieces, strict=True):
        yield part, piece[: len(part)]


def pinned_memory(size_bytes: int, purpose: str) -> torch.Tensor:
    """Returns host memory for asynchronous copies from a GPU, [size_bytes] uint8; pageable memory, with a warning that
    names the purpose, where the driver refuses.

    torch's own pinned memory comes in powers of two: for 70 GiB of state each rank would take 128. So pageable memory
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
        # at the end of the process the driver ends with it
        weakref.finalize(memory, driver.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory
