"""Memory of the host that copies come to and go from, and the stream on which they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mtrain.checkpoint.format.snapshot import pinned_memory

PIECE_BYTES = 2**21
"""A copy of one takes ten times as long as its start."""
_PIECES_AT_ONCE = 32
"""Memory is pinned by 64 MiB."""


class HostBlocks:
    """Memory of the host, block by block: pinned where a GPU copies, and plain from the first time that the driver
    refuses, which is one warning."""

    def __init__(self, is_pinned: bool, purpose: str) -> None:
        """
        Args:
            is_pinned: Whether it is asked for.
            purpose: What it is for, in the warning.
        """
        self._is_pinned, self._purpose = is_pinned, purpose

    def block(self, size_bytes: int) -> Tensor:
        """[size_bytes] uint8. To be held itself, and not its views alone: with it what is pinned is given back."""
        if not self._is_pinned:
            return torch.empty(size_bytes, dtype=torch.uint8)
        memory = pinned_memory(size_bytes, self._purpose)
        self._is_pinned = memory.is_pinned()
        return memory


class HostMemory:
    """Pieces of one size, used again and again; pinned where a GPU copies.

    Pieces, as sizes change from step to step with the tokens that experts get: blocks as large as what they hold would
    fit nothing else. It grows when there are too few, and never shrinks.
    """

    def __init__(self, is_pinned: bool) -> None:
        """No memory is taken yet."""
        self._source = HostBlocks(is_pinned, "moved activations")
        self._blocks: list[Tensor] = []
        self._free: list[Tensor] = []

    @property
    def size_bytes(self) -> int:
        """Of all pieces."""
        return sum(block.nbytes for block in self._blocks)

    def take(self, size_bytes: int) -> list[Tensor]:
        """Pieces that hold so much together, [PIECE_BYTES] uint8 each."""
        count = -(-size_bytes // PIECE_BYTES)
        while len(self._free) < count:
            self._grow()
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pieces: list[Tensor]) -> None:
        """They may be overwritten by copies that are started from now on."""
        self._free += pieces

    def _grow(self) -> None:
        memory = self._source.block(PIECE_BYTES * _PIECES_AT_ONCE)
        self._blocks.append(memory)
        self._free += torch.split(memory, PIECE_BYTES)


class CopyStream:
    """Copies in the order in which they were asked for, beside what the device computes; on a CPU they are done at
    once."""

    def __init__(self, device: torch.device) -> None:
        """Args:
        device: From and to which is copied.
        """
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copies of the block begin when all that the device was given before is done. Allocate outside of it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def moment(self) -> Any:
        """When the copies so far are done; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, moment: Any) -> None:
        """What the device is given from now on begins after `moment`; the host goes on."""
        if moment is not None:
            torch.cuda.current_stream().wait_event(moment)


def copy_to_host(values: Tensor, pieces: list[Tensor]) -> None:
    """Without waiting, where the pieces are pinned.

    Args:
        values: Contiguous, of one axis.
        pieces: As `HostMemory.take` gives them for its size.
    """
    for part, piece in _parts(values, pieces):
        piece.copy_(part, non_blocking=True)


def copy_from_host(pieces: list[Tensor], values: Tensor) -> None:
    """The way back."""
    for part, piece in _parts(values, pieces):
        part.copy_(piece, non_blocking=True)


def _parts(values: Tensor, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for part, piece in zip(torch.split(values.view(torch.uint8), PIECE_BYTES), pieces, strict=True):
        yield part, piece[: len(part)]
