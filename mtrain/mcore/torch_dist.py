"""Writes and reads global tensors in megatron-core's `torch_dist` format, in the ranks themselves.

megatron-core's own writer starts helper processes: a spawned manager on each rank that imports the main script again,
and forked writers; it hangs for ever if psutil is missing or a writer is killed (filesystem_async.py:54, 308, 642).
Here each rank writes its shards itself, through torch's writer and megatron-core's planners. Whatever fails on one rank
while planning or writing is raised on all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from mtrain.checkpoint.safe_load import VerifiedReader
from mtrain.errors import DataError, MtrainError
from mtrain.mcore.world import on_all_ranks

Fault = TypeVar("Fault", bound=MtrainError)
_NAMES_TOLD = 8
"""Most names in one message."""


def load_tensors(
    reader: VerifiedReader, tensors: Iterable[ShardedTensor], may_be_left: Callable[[str], bool], vocab_size: int
) -> None:
    """Reads global tensors into `data` of this rank's shards, in place. Collective over the world.

    Everything is compared before anything is read.

    Args:
        reader: From `verified_reader`.
        tensors: This rank's shards, contiguous, with data of the dtype that was saved.
        may_be_left: Which keys of the checkpoint may stay unread.
        vocab_size: Rows that a tensor of flexible shape must have at least; what lies behind is padding.

    Raises:
        DataError: A tensor is not in the checkpoint, is there with another shape or dtype, is there and is not asked
            for by any rank, or cannot be read; on all ranks.
    """
    shards = _by_key(tensors)
    _check_keys(reader, shards, may_be_left)
    on_all_ranks(lambda: _check_shapes(reader, shards, vocab_size))
    flexible = {key: group[0] for key, group in shards.items() if group[0].allow_shape_mismatch}
    fixed = [tensor for key, group in shards.items() if key not in flexible for tensor in group]
    planner = MCoreLoadPlanner(
        flatten_state_dict=False,
        shapes_validation_sharded_tensors=fixed,
        allow_shape_mismatch_sharded_tensors=flexible,
    )
    try:
        load(mcore_to_pyt_state_dict(dict(shards), is_loading=True), storage_reader=reader, planner=planner)
    except CheckpointException as fault:
        rank, cause = _first_failure(fault)
        raise _of_all_ranks(
            DataError(f"{reader.folder} cannot be read: rank {rank}: {cause}; restore it or use another one")
        ) from None


def _by_key(tensors: Iterable[ShardedTensor]) -> dict[str, list[ShardedTensor]]:
    shards: dict[str, list[ShardedTensor]] = defaultdict(list)
    for tensor in tensors:
        assert tensor.data is not None, tensor.key
        assert tensor.data.is_contiguous(), f"{tensor.key} would be copied"
        shards[tensor.key].append(tensor)
    return shards


def _check_keys(reader: VerifiedReader, keys: Collection[str], may_be_left: Callable[[str], bool]) -> None:
    """One all-gather of key names: stages ask for different tensors."""
    everyone: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everyone, set(keys))
    asked, saved = set().union(*everyone), set(reader.metadata.state_dict_metadata)
    left = {key for key in saved - asked if not may_be_left(key)}
    if asked <= saved and not left:
        return
    faults = []
    if asked - saved:
        faults.append(f"lacks {_told(asked - saved)}, which the model has")
    if left:
        faults.append(f"holds {_told(left)}, which the model has not")
    raise _of_all_ranks(DataError(f"{reader.folder} {' and '.join(faults)}; use the model that it was saved from"))


def _check_shapes(reader: VerifiedReader, shards: dict[str, list[ShardedTensor]], vocab_size: int) -> None:
    faults = []
    for key, (tensor, *_) in sorted(shards.items()):
        saved = reader.metadata.state_dict_metadata[key]
        if not isinstance(saved, TensorStorageMetadata):
            faults.append(f"{key} is not a tensor")
            continue
        shape, wanted = tuple(saved.size), tuple(tensor.global_shape)
        rows_suffice = tensor.allow_shape_mismatch and shape[:1] >= (vocab_size,) and shape[1:] == wanted[1:]
        if shape != wanted and not rows_suffice:
            faults.append(f"{key} has shape {list(shape)}, but the model needs {list(wanted)}")
        if saved.properties.dtype != tensor.dtype:
            faults.append(f"{key} is {saved.properties.dtype}, but the run needs {tensor.dtype}")
    if faults:
        more = f" and {len(faults) - _NAMES_TOLD} more" if len(faults) > _NAMES_TOLD else ""
        raise DataError(
            f"{reader.folder}: {'; '.join(faults[:_NAMES_TOLD])}{more}; use the model that it was saved from"
        )


def _of_all_ranks(error: Fault) -> Fault:
    """Marks what all ranks raise, so that one of them tells it."""
    error.on_every_rank = True
    return error


def _told(keys: set[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
    return ", ".join(names[:_NAMES_TOLD]) + more


def _first_failure(fault: CheckpointException) -> tuple[int, str]:
    rank = min(fault.failures)
    cause = fault.failures[rank][0]
    return rank, f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else 'no message'}"
