"""Whole parameters and gradients under their global names: for comparing layouts, for small models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from numpy.typing import NDArray
from torch import Tensor

from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.writer import Shard
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.model.build import unwrap
from mtrain.mcore.model.init_weights import sharded_tensors
from mtrain.mcore.model.layer_spec import global_name


def parameter_shards(chunks: Sequence[DistributedDataParallel], groups: Groups) -> list[Shard]:
    """Copies of this rank's parameters, in their own dtype, on the CPU; of buffers too, which have no gradient."""
    return _shards(chunks, groups, lambda value: value)


def gradient_shards(chunks: Sequence[DistributedDataParallel], groups: Groups) -> list[Shard]:
    """Copies of this rank's reduced gradients, float32, on the CPU.

    Call between the schedule and the optimizer's update, which clips in place. With the distributed optimizer a rank
    has only its own part of the sum, so the parts are first gathered: one all-gather over DP x CP for each bucket.
    """
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:  # else every rank has the whole sum already
            _complete_gradients(chunk)
    # DDP's float32 view; buffers have none and are left out.
    return _shards(chunks, groups, lambda parameter: getattr(parameter, "main_grad", None))


def gather_whole(shards: Sequence[Shard]) -> dict[str, Tensor] | None:
    """Global tensors by name on rank 0; None elsewhere. One gather of objects to rank 0 over the world."""
    # Pickled and sent to rank 0, where the whole model has to fit: for comparisons of small models.
    everyone: list[list[_Sent]] | None = [[] for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather_object([_Sent.of(shard) for shard in shards], everyone)
    return None if everyone is None else assemble(sent.shard() for rank in everyone for sent in rank)


class _Sent(NamedTuple):
    """A shard on its way; a tensor would be pickled as a file of its own: of hundreds that takes longer than a step."""

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
    """Puts shards of all ranks together.

    Raises:
        ValueError: Two ranks hold different values for the same element, or an element is held by none.
    """
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for shard in shards:
        if shard.key not in whole:
            whole[shard.key] = torch.zeros(shard.global_shape, dtype=shard.data.dtype)
            # Zeros are a value too, so what has been filled is kept apart.
            filled[shard.key] = torch.zeros(shard.global_shape, dtype=torch.bool)
        # Replicas are compared where an earlier shard has been: ranks that part silently are a fault of their own.
        there, known = shard.at.of(whole[shard.key]), shard.at.of(filled[shard.key])
        if not torch.equal(_bits(there[known]), _bits(shard.data[known])):
            raise ValueError(f"replicas of {shard.key} at {shard.at.offset} differ between ranks")
        there.copy_(shard.data)
        known.fill_(True)
    # A gap would compare as zeros, silently.
    missing = [name for name, mask in filled.items() if not mask.all()]
    if missing:
        raise ValueError(f"no rank holds all of {', '.join(missing)}")
    return whole


def _bits(values: Tensor) -> Tensor:
    """[bytes]: the same NaN on two ranks is no difference between them, although it is not equal to itself."""
    return values.flatten().view(torch.uint8)


def _complete_gradients(chunk: DistributedDataParallel) -> None:
    for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        group = bucket_group.intra_distributed_optimizer_instance_group  # DP x CP, for experts their own replicas
        for bucket in bucket_group.buckets:
            # Buckets are padded to a multiple of the ranks, so parts are equal; cloned, or input and output overlap.
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def _shards(
    chunks: Sequence[DistributedDataParallel], groups: Groups, value_of: Callable[[Tensor], Tensor | None]
) -> list[Shard]:
    shards = []
    for chunk in chunks:
        # Fused parameters come as their parts, so that names and shapes are the same for every tp.
        for part in sharded_tensors(unwrap(chunk), groups, value_of):
            axes = part.prepend_axis_num
            name = global_name(part.key, tuple(part.global_offset[:axes]))
            # A copy on CPUs too: clipping and the next step write in place.
            values = part.data.detach().to("cpu", copy=True)
            at = TensorSlice(tuple(part.global_offset[axes:]), tuple(values.shape))
            shards.append(Shard(name, tuple(part.global_shape[axes:]), at, values))
    return shards
