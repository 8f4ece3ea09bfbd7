"""Short vectors summed over ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


class SummedOverRanks:
    """The sum of every rank's vector: one collective, started at once and awaited when read; the same bits everywhere.

    GPUs all-reduce. On CPUs each rank sends its vector to each other one, and all add the same rows in the same order:
    gloo's all-reduce cuts even five numbers into pieces and sends each of them around a ring twice, which takes about
    three times as long on 4 ranks (`tools/bench/pairs.py` measures both).
    """

    def __init__(self, vector: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Args:
        vector: [n], not to be used afterwards.
        group: The ranks; None for all.
        """
        size = dist.get_world_size(group)
        self._rows = vector.view(1, -1)
        self._work: dist.Work | None = None
        if size > 1 and vector.device.type == "cpu":
            self._rows = vector.new_empty(size, len(vector))
            self._work = dist.all_to_all_single(self._rows, vector.repeat(size, 1), group=group, async_op=True)
        elif size > 1:
            self._work = dist.all_reduce(vector, group=group, async_op=True)
        self._sum: Tensor | None = None

    def get(self) -> Tensor:
        """[n], on the device."""
        if self._sum is None:
            if self._work is not None:
                self._work.wait()
            self._sum = self._rows.sum(0)
        return self._sum
