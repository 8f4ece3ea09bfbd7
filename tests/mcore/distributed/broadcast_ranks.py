"""What a rank of a tensor-parallel group gets, and what it copies from its device for that."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mtrain.config import Config
from mtrain.data.batch import Microbatch
from mtrain.loss.pair import MAIN_TERM
from mtrain.mcore.distributed.broadcast import broadcast_batches
from mtrain.mcore.distributed.groups import Groups


def batch(number: int, width: int) -> Microbatch:
    """A row of documents whose lengths depend on its number."""
    rows = torch.arange(width).view(1, -1) + number
    starts = (torch.arange(width) // (number + 3) * (number + 3)).to(torch.int32).view(1, -1)
    weights = {MAIN_TERM: torch.rand(1, width, generator=torch.Generator().manual_seed(number))}
    shares = {MAIN_TERM: weights[MAIN_TERM].double()}
    return Microbatch(rows, rows + 1, rows + 2, weights, shares, starts, None)


def received(groups: Groups, config: Config, count: int) -> tuple[bool, int]:
    """Whether all rows are those of rank 0; and how often this rank has moved something to the host."""
    batches = [batch(number, config.row_width) for number in range(count)]
    to, moved = Tensor.to, list[object]()

    def counted(tensor: Tensor, *given: Any, **options: Any) -> Tensor:
        moved.extend(each for each in (*given, *options.values()) if str(each) == "cpu" and given[:1] == ("cpu",))
        return to(tensor, *given, **options)

    with mock.patch.object(Tensor, "to", counted):
        found = broadcast_batches(batches if groups.tp_rank == 0 else None, count, [MAIN_TERM], config, groups)
    pairs = [(one.tensors(), other.tensors()) for one, other in zip(found, batches, strict=True)]
    same = all(
        one.keys() == other.keys()
        and all(torch.equal(one[path], other[path]) and one[path].dtype == other[path].dtype for path in one)
        for one, other in pairs
    )
    return same, len(moved)
