"""Short vectors summed over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.core.ranks.groups import to_device


class AsyncAllReduce:
    """An all-reduce (sum) that starts at once and is awaited when read; the result has the same bits on every rank.

    On CPUs gloo's all-reduce would send even five numbers around a ring twice, in pieces. Instead, if the number of
    ranks is a power of two, ranks at distance 1, 2, 4, ... swap their sums; otherwise each rank sends its vector to
    every other rank (`tools/bench/pairs.py` compares this with gloo).
    """

    def __init__(self, vector: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Starts to sum [n] vectors over a group (None: all ranks); callers must not use their vector afterwards."""
        size = dist.get_world_size(group)
        self._sum: Tensor | None = vector if size == 1 else None
        self._group = group
        self._swap: _Swap | None = None
        self._rows, self._work = vector.view(1, -1), None
        if size == 1:
            return
        if vector.device.type != "cpu":
            self._work = dist.all_reduce(vector, group=group, async_op=True)
        elif size & (size - 1) == 0:  # a power of two: every rank has a partner at every distance
            self._swap = _Swap(vector, 1, group)  # only the first round runs in the background
        else:
            self._rows = vector.new_empty(size, len(vector))  # row r comes from rank r
            self._work = dist.all_to_all_single(self._rows, vector.repeat(size, 1), group=group, async_op=True)

    def get(self) -> Tensor:
        """Returns the sum, [n] on the device."""
        if self._sum is None:
            self._sum = self._swapped(self._swap) if self._swap is not None else self._awaited()
        return self._sum

    def _awaited(self) -> Tensor:
        assert self._work is not None
        self._work.wait()
        # on GPUs the only row, which the all-reduce has filled in place
        return self._rows.sum(0)

    def _swapped(self, swap: _Swap) -> Tensor:
        """Completes all rounds of swaps; both partners add the same two numbers, so sums agree to the bit."""
        vector, distance = swap.added(), 2
        while distance < dist.get_world_size(self._group):
            vector = _Swap(vector, distance, self._group).added()
            distance *= 2
        return vector


class AsyncVote:
    """A vote on whether a flag is true on any rank of the world, started now and read after other work.

    On a GPU the result is copied to the host asynchronously, so reading it waits for no work queued later.
    """

    def __init__(self, flag: bool, device: torch.device) -> None:
        """Starts the vote; collective over the world."""
        vote = torch.tensor([float(flag)])
        if device.type == "cpu":
            self._votes, self._arrived = AsyncAllReduce(vote), None
            return
        self._votes = AsyncAllReduce(to_device(vote, device))
        self._host = torch.empty(1, pin_memory=True)
        self._host.copy_(self._votes.get(), non_blocking=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()

    def read(self) -> bool:
        """Returns the result; all ranks must call it at the same point, since on CPUs it may take further messages."""
        if self._arrived is None:
            return self._votes.get().item() > 0
        self._arrived.synchronize()  # returns at once if read a step later
        return self._host.item() > 0


class _Swap:
    """An exchange of vectors between two ranks."""

    def __init__(self, vector: Tensor, distance: int, group: dist.ProcessGroup | None) -> None:
        """Starts to exchange an [n] vector on the CPU with the rank that differs in the bit `distance`."""
        partner = dist.get_rank(group) ^ distance
        self._vector, self._received = vector, torch.empty_like(vector)
        # both are posted before either is awaited, since two partners that first wait for their sends could deadlock
        self._works = [
            dist.isend(vector, group=group, group_dst=partner),
            dist.irecv(self._received, group=group, group_src=partner),
        ]

    def added(self) -> Tensor:
        """Waits for the partner's vector, and returns the sum of both."""
        for work in self._works:
            assert work is not None, "this rank is in the group"
            work.wait()
        return self._vector + self._received
