"""Writes global tensors in the `torch_dist` format, without a save plan for the ranks to agree on.

Each rank writes its shards into one file, one `torch.save` record after another. The first rank lists their positions
in `.metadata`, in torch's classes, so that torch's and megatron-core's readers find any slice of any tensor.
"""

import io
import json
import logging
import math
import mmap
import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mtrain.base.background import started
from mtrain.base.errors import DataError
from mtrain.base.heartbeat import tick
from mtrain.checkpoint.format.hashed_file import HashedFile, write_hashed
from mtrain.checkpoint.format.safe_metadata import GlobalTensor, SavedSlice
from mtrain.checkpoint.store.manifest import FileInfo
from mtrain.core.state.host_memory import pinned_memory
from mtrain.core.state.shard import Shard

METADATA_NAME = ".metadata"
_TORCH_FORMAT = "1.0.0"
"""Version of the metadata that torch 2.9 to 2.13 write."""
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of metadata.json, from which megatron-core recognizes the format."""


class Written(NamedTuple):
    """Files and tensors that one rank has written."""

    files: dict[str, FileInfo]
    tensors: list[tuple[str, GlobalTensor]]
    """Key and slice of each shard."""


def write_shards(
    path: Path, shards: Sequence[Shard], before_each: Callable[[int], None] = lambda number: None
) -> Written:
    """Writes the shards, on any device, into one file and syncs it; without shards, writes no file.

    Args:
        before_each: Called with the index of each shard before it is written.
    """
    # a file of 0 bytes could not be mapped
    if not shards:
        return Written({}, [])
    tensors = []
    with HashedFile(path) as file:
        for number, shard in enumerate(shards):
            before_each(number)
            tick()  # shows that a large save makes progress
            start = file.tell()
            # view, not reshape, which would silently copy data that is not contiguous
            save_record(shard.data.detach().view(shard.at.shape).cpu(), file)
            saved = SavedSlice(shard.at, path.name, start, file.tell() - start)
            tensors.append((shard.key, GlobalTensor(shard.data.dtype, shard.global_shape, (saved,))))
        return Written({path.name: file.finish()}, tensors)


def write_metadata(folder: Path, tensors: Iterable[tuple[str, GlobalTensor]]) -> dict[str, FileInfo]:
    """Writes the metadata of all tensors, and the other files that megatron-core needs.

    Args:
        tensors: Key and slice of all ranks' shards, which together must cover every tensor exactly once.
    """
    by_key: dict[str, list[GlobalTensor]] = {}
    for key, tensor in tensors:
        by_key.setdefault(key, []).append(tensor)
    listed: dict[str, STORAGE_TYPES] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for key, parts in sorted(by_key.items()):
        whole = _joined(key, parts)
        chunks = [ChunkStorageMetadata(*map(torch.Size, saved.at)) for saved in whole.slices]
        listed[key] = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), torch.Size(whole.shape), chunks)
        for saved in whole.slices:
            index = MetadataIndex(key, torch.Size(saved.at.offset))
            storage[index] = _StorageInfo(saved.file, saved.start_bytes, saved.length_bytes)
    # planner_data is empty, not None, because torch's readers look keys up in it; our names are flat
    metadata = Metadata(state_dict_metadata=listed, planner_data={}, storage_data=storage, version=_TORCH_FORMAT)
    common = io.BytesIO()
    torch.save({}, common)  # megatron-core needs the file; we pickle nothing into it
    contents = {
        # a pickle, because torch's reader needs one; ours reads it without unpickling (`safe_metadata`)
        METADATA_NAME: pickle.dumps(metadata),
        "common.pt": common.getvalue(),
        "metadata.json": json.dumps(_BACKENDS).encode(),
    }
    return {name: write_hashed(folder / name, content) for name, content in contents.items()}


def save_record(tensor: Tensor, file: HashedFile) -> None:
    """Appends one contiguous CPU tensor to the file, without a copy."""
    torch.serialization.set_crc32_options(False)  # the file's digest covers everything
    try:
        torch.save(_alone(tensor), file)  # type: ignore[arg-type]
    except RuntimeError as fault:  # torch's writer only reports an unexpected position
        # the disk's OSError is somewhere in the chain
        refusal = fault.__context__
        while refusal is not None and not isinstance(refusal, OSError):
            refusal = refusal.__context__
        raise refusal or fault from fault


def _alone(tensor: Tensor) -> Tensor:
    """Returns the same memory as a separate storage, because torch.save of a view would write the whole storage."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if tensor.numel() == 0:
        return tensor.clone()
    # uint8, because numpy has no bfloat16; frombuffer makes a storage of this memory, without a copy
    raw = tensor.view(-1).view(torch.uint8).numpy().data
    return torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)


def _joined(key: str, parts: Sequence[GlobalTensor]) -> GlobalTensor:
    """Joins the written parts of one tensor; refuses them if a rank is missing or has written twice."""
    whole = parts[0]._replace(slices=tuple(saved for tensor in parts for saved in tensor.slices))
    elements = sum(saved.at.num_elements for saved in whole.slices)
    is_uniform = all(tensor[:2] == whole[:2] for tensor in parts)
    if (
        not is_uniform
        or len({saved.at.offset for saved in whole.slices}) != len(whole.slices)
        or elements != math.prod(whole.shape)
    ):
        raise DataError(
            f"the ranks have written {elements} elements of {key} in {len(whole.slices)} slices, instead of its "
            f"{math.prod(whole.shape)} elements {list(whole.shape)}; nothing was published"
        )
    return whole


_log = logging.getLogger(__name__)

# A cache line, and a multiple of every dtype's size, so that every element is aligned.
_ALIGNMENT_BYTES = 64


class Snapshot:
    """Host memory that every save reuses; pinned if the state is on a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._expected: Future[torch.Tensor] | None = None

    @property
    def size_bytes(self) -> int:
        return self._buffer.nbytes

    def expect(self, shards: Sequence[Shard]) -> None:
        """Allocates the memory for such shards in a thread, so that the first `take` does not wait for it.

        The system allocates page by page, at a fraction of the speed of a copy.
        """
        size_bytes, on_gpu = sum(map(_place_bytes, shards)), _is_on_gpu(shards)
        if self._expected is None and size_bytes > self._buffer.nbytes:
            self._expected = started(lambda: _touched(_memory(size_bytes, on_gpu)), "snapshot-memory")

    def take(self, shards: Sequence[Shard]) -> list[Shard]:
        """Copies all shards; the originals may change once this returns. The next call overwrites the copies."""
        if self._expected is not None:
            expected, self._expected = self._expected, None
            self._buffer = expected.result()
        sizes, on_gpu = [_place_bytes(shard) for shard in shards], _is_on_gpu(shards)
        # grows and never shrinks: fresh pages cost several times the copy (docs/weights/checkpoints.md, first save)
        if sum(sizes) > self._buffer.nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old buffer first
            self._buffer = _memory(sum(sizes), on_gpu)
        # numpy's slices keep the buffer alive while a copy is in use
        memory, start, copies = self._buffer.numpy(), 0, list[Shard]()
        for shard, size in zip(shards, sizes, strict=True):
            memory_slice = memory[start : start + shard.data.nbytes]
            copy = (
                torch.frombuffer(memory_slice, dtype=shard.data.dtype)
                if shard.data.numel()
                else shard.data.detach().cpu()
            )
            # on training's stream, so that the copy follows the update that was enqueued before it
            copy.copy_(shard.data.detach().flatten(), non_blocking=on_gpu)
            copies.append(shard._replace(data=copy))
            start += size
        if on_gpu:
            # the caller may change the state as soon as this returns
            torch.cuda.current_stream().synchronize()
        return copies


def _place_bytes(shard: Shard) -> int:
    return -(-shard.data.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _is_on_gpu(shards: Sequence[Shard]) -> bool:
    """Returns whether to pin the memory; a copy from a GPU to pageable memory would not be asynchronous."""
    return any(shard.data.is_cuda for shard in shards)


def _memory(size_bytes: int, on_gpu: bool) -> torch.Tensor:
    return pinned_memory(size_bytes, "snapshots") if on_gpu else torch.empty(size_bytes, dtype=torch.uint8)


def _touched(memory: torch.Tensor) -> torch.Tensor:
    """Writes to every page of the memory, so that the system allocates all of it, and returns it."""
    # numpy releases the GIL while it writes, and uses no threads that training would wait for
    memory.numpy()[:: mmap.PAGESIZE] = 0
    return memory
