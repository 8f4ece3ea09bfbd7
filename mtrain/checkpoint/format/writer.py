"""Global tensors in files of the `torch_dist` format, without a plan that ranks would have to agree on.

Each rank writes the boxes that it holds into one file, one `torch.save` record after the other. Where they lie is all
that has to come together; the first rank lists it in `.metadata`, in torch's own classes, so that torch's and
megatron-core's readers find any box of any tensor.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
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

from mtrain.base.errors import DataError
from mtrain.checkpoint.format.hashed_file import HashedFile, write_hashed
from mtrain.checkpoint.store.manifest import FileInfo

METADATA_NAME = ".metadata"
METADATA_FILES = (METADATA_NAME, "common.pt", "metadata.json")
"""What `write_metadata` writes."""
_TORCH_FORMAT = "1.0.0"
"""Of the list, as torch 2.9 to 2.13 write it."""
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""By which megatron-core knows the format."""


class Part(NamedTuple):
    """A box of a global tensor."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    """Of the box; as many axes as the global tensor."""
    data: Tensor
    """Its elements, contiguous, in any shape."""
    may_be_padded: bool = False
    """Whether the tensor's last rows are padding, whose number follows the layout."""


class Place(NamedTuple):
    """Where a box was written."""

    key: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start_bytes: int
    length_bytes: int


class Written(NamedTuple):
    """What one rank has put on disk."""

    files: dict[str, FileInfo]
    places: list[Place]


def write_shards(
    path: Path, parts: Sequence[Part], before_each: Callable[[int], None] = lambda number: None
) -> Written:
    """Writes one file; it is on disk when this returns. No file where there are no parts.

    Args:
        path: Must not exist.
        parts: On any device; those on a GPU are copied one after the other.
        before_each: Called with the number of each part before it is written.

    Raises:
        OSError: The disk refuses.
    """
    if not parts:
        return Written({}, [])
    places = []
    with HashedFile(path) as file:
        for number, part in enumerate(parts):
            before_each(number)
            start = file.tell()
            save_record(part.data.detach().view(part.sizes).cpu(), file)
            places.append(
                Place(*part[:1], part.data.dtype, *part[1:4], path.name, start, file.tell() - start),
            )
        return Written({path.name: file.finish()}, places)


def write_metadata(folder: Path, places: Iterable[Place]) -> dict[str, FileInfo]:
    """Writes the list of all tensors and what megatron-core asks for beside it.

    Args:
        folder: Of the checkpoint.
        places: Of all ranks; together they must cover every tensor exactly.

    Raises:
        DataError: They do not.
        OSError: The disk refuses.
    """
    by_key: dict[str, list[Place]] = {}
    for place in places:
        by_key.setdefault(place.key, []).append(place)
    tensors: dict[str, STORAGE_TYPES] = {}
    lies: dict[MetadataIndex, _StorageInfo] = {}
    for key, group in sorted(by_key.items()):
        _check_cover(key, group)
        chunks = [ChunkStorageMetadata(torch.Size(place.offset), torch.Size(place.sizes)) for place in group]
        first = group[0]
        tensors[key] = TensorStorageMetadata(
            TensorProperties(dtype=first.dtype), torch.Size(first.global_shape), chunks
        )
        for place in group:
            lies[MetadataIndex(key, torch.Size(place.offset))] = _StorageInfo(
                place.file, place.start_bytes, place.length_bytes
            )
    metadata = Metadata(state_dict_metadata=tensors, planner_data={}, storage_data=lies, version=_TORCH_FORMAT)
    common = io.BytesIO()
    torch.save({}, common)  # megatron-core asks for it; nothing of ours is pickled
    contents = {
        METADATA_NAME: pickle.dumps(metadata),
        "common.pt": common.getvalue(),
        "metadata.json": json.dumps(_BACKENDS).encode(),
    }
    return {name: write_hashed(folder / name, content) for name, content in contents.items()}


def save_record(tensor: Tensor, file: HashedFile) -> None:
    """Appends one tensor on the CPU, contiguous; it is not copied."""
    torch.serialization.set_crc32_options(False)  # SHA-256 covers the whole file
    try:
        torch.save(_alone(tensor), file)  # type: ignore[arg-type]
    except RuntimeError as fault:  # torch's writer says only that a position is not what it expected
        refusal = fault.__context__
        while refusal is not None and not isinstance(refusal, OSError):
            refusal = refusal.__context__
        raise refusal or fault from fault


def _alone(tensor: Tensor) -> Tensor:
    """The same memory without neighbours: of a view, torch.save writes the whole storage."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if tensor.numel() == 0:
        return tensor.clone()
    raw = tensor.view(-1).view(torch.uint8).numpy().data
    return torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)


def _check_cover(key: str, places: Sequence[Place]) -> None:
    """Equal facts, distinct corners and the right number of elements: enough to notice a rank left out or doubled."""
    first = places[0]
    elements = sum(math.prod(place.sizes) for place in places)
    corners = {place.offset for place in places}
    is_uniform = all((place.dtype, place.global_shape) == (first.dtype, first.global_shape) for place in places)
    if not is_uniform or len(corners) != len(places) or elements != math.prod(first.global_shape):
        raise DataError(
            f"the ranks hold {elements} elements of {key} in {len(places)} boxes, which are not its "
            f"{math.prod(first.global_shape)} elements {list(first.global_shape)}; nothing was published"
        )
