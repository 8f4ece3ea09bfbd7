"""Whole parameters and gradients on rank 0, for comparing layouts of small models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mtrain.base.tensor_slice import TensorSlice
from mtrain.core.state.shard import Shard


def gather_whole(shards: Sequence[Shard]) -> dict[str, Tensor] | None:
    """Returns global tensors by name on rank 0; None elsewhere. One gather of objects to rank 0 over the world."""
    # pickled and sent to rank 0, where the whole model has to fit: for comparisons of small models
    everyone: list[list[_Sent]] | None = [[] for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather_object([_Sent.of(shard) for shard in shards], everyone)
    return None if everyone is None else assemble(sent.shard() for rank in everyone for sent in rank)


class _Sent(NamedTuple):
    """A shard as bytes: tensors would be pickled as files, which for hundreds takes longer than a step."""

    key: str
    global_shape: tuple[int, ...]
    at: TensorSlice
    dtype: torch.dtype
    content: NDArray[np.uint8]

    @classmethod
    def of(cls, shard: Shard) -> _Sent:
        return cls(shard.key, tuple(shard.global_shape), shard.at, shard.data.dtype, _bits(shard.data).numpy())

    def shard(self) -> Shard:
        values = torch.from_numpy(self.content).view(self.dtype).view(self.at.shape)
        return Shard(self.key, self.global_shape, self.at, values)


def assemble(shards: Iterable[Shard]) -> dict[str, Tensor]:
    """Assembles whole tensors from the shards of all ranks.

    Raises:
        ValueError: Two ranks hold different values for the same element, or no rank holds an element.
    """
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for shard in shards:
        if shard.key not in whole:
            whole[shard.key] = torch.zeros(shard.global_shape, dtype=shard.data.dtype)
            # zeros are a value too, so the filled part is recorded separately
            filled[shard.key] = torch.zeros(shard.global_shape, dtype=torch.bool)
        # Replicas are compared where an earlier shard has been: ranks that silently differ are an error of their own.
        there, known = shard.at.of(whole[shard.key]), shard.at.of(filled[shard.key])
        if not torch.equal(_bits(there[known]), _bits(shard.data[known])):
            raise ValueError(f"replicas of {shard.key} at {shard.at.offset} differ between ranks")
        there.copy_(shard.data)
        known.fill_(True)
    # a gap would silently compare as zeros
    missing = [name for name, mask in filled.items() if not mask.all()]
    if missing:
        raise ValueError(f"no rank holds all of {', '.join(missing)}")
    return whole


def _bits(values: Tensor) -> Tensor:
    """Returns [bytes]: the same NaN on two ranks is no difference between them, although it is not equal to itself."""
    return values.flatten().view(torch.uint8)
