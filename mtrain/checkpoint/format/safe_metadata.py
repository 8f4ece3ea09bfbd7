"""Reader of a checkpoint's metadata that runs and builds nothing that they name.

torch keeps them, `.metadata`, as a pickle, and a pickle can name any function to call. They are read as plain data
(`inert_pickle`), and every value that is used is checked here. Nothing else of a checkpoint is unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from mtrain.base.errors import DataError
from mtrain.base.plain_files import read_plain_file
from mtrain.base.tensor_slice import Sizes, TensorSlice
from mtrain.checkpoint.format.inert_pickle import Built, Named, read_inert

_METADATA = ".metadata"
_MOST_BYTES = 1 << 28
"""Largest size of the metadata; about two million slices."""
_MOST_AXES = 64
"""Largest number of axes, as in torch."""
_MOST_ELEMENTS = 1 << 63
_LONGEST_NAME = 255
"""Largest number of bytes in a file's name."""
_LONGEST_KEY = 1000
"""Largest number of characters in a tensor's name."""
_IN_TORCH = "torch.distributed.checkpoint."
# every dtype that this torch has, under all names (torch.half and torch.float16)
_DTYPES = {f"torch.{name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_ALLOWED = {
    *_DTYPES,
    "builtins.set",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
    f"{_IN_TORCH}filesystem._StorageInfo",
    f"{_IN_TORCH}filesystem._StoragePrefix",
    f"{_IN_TORCH}metadata.BytesStorageMetadata",
    f"{_IN_TORCH}metadata.ChunkStorageMetadata",
    f"{_IN_TORCH}metadata.Metadata",
    f"{_IN_TORCH}metadata.MetadataIndex",
    f"{_IN_TORCH}metadata.StorageMeta",
    f"{_IN_TORCH}metadata.TensorProperties",
    f"{_IN_TORCH}metadata.TensorStorageMetadata",
    f"{_IN_TORCH}metadata._MEM_FORMAT_ENCODING",
    f"{_IN_TORCH}planner.SavePlan",  # megatron-core's own writer adds its plans
    f"{_IN_TORCH}planner.TensorWriteData",
    f"{_IN_TORCH}planner.WriteItem",
    f"{_IN_TORCH}planner.WriteItemType",
}
"""Names that the metadata may use."""


class SavedSlice(NamedTuple):
    """Slice of a global tensor and the place of its bytes."""

    at: TensorSlice
    file: str
    """Plain name of a file in the checkpoint's folder."""
    start_bytes: int
    """First byte in the file."""
    length_bytes: int
    """Length of the record, including everything that torch.save writes around the values."""


class GlobalTensor(NamedTuple):
    """Metadata of one tensor."""

    dtype: torch.dtype
    shape: Sizes
    slices: tuple[SavedSlice, ...]
    """Saved slices, all with distinct offsets and inside the shape."""


class TensorMetadata(NamedTuple):
    """Metadata of a checkpoint, checked."""

    tensors: dict[str, GlobalTensor]
    others: set[str]
    """Names of saved objects that are not tensors; these cannot be read."""


def read_metadata(folder: Path) -> TensorMetadata:
    """Reads and checks the list of tensors of a checkpoint in `torch_dist` format.

    Raises:
        DataError: The metadata are missing, damaged or too long, name code or files elsewhere, or contradict
            themselves.
    """
    path = folder / _METADATA
    try:
        return _tensor_metadata(read_inert(read_plain_file(path, _MOST_BYTES), _ALLOWED))
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    except ValueError as fault:
        raise DataError(f"{path} is not a list of tensors: {fault}; restore the checkpoint or use another") from fault
    except MemoryError as fault:
        raise DataError(f"{path} does not fit into memory; restore the checkpoint or use another") from fault


def _tensor_metadata(content: Any) -> TensorMetadata:
    metadata = _fields(content, "metadata.Metadata")
    saved, storage = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(saved, dict) or not isinstance(storage, dict):
        raise ValueError("it has no names of tensors, or no files")
    places = _places(storage)
    tensors: dict[str, GlobalTensor] = {}
    others = set()
    for key, facts in saved.items():
        # isprintable: the name stands in messages and must not break their one line
        if not isinstance(key, str) or not 0 < len(key) <= _LONGEST_KEY or not key.isprintable():
            raise ValueError(f"it has {repr(key)[:_LONGEST_NAME]} as a name")
        if isinstance(facts, Built) and facts.name == f"{_IN_TORCH}metadata.BytesStorageMetadata":
            # listed, not read: their bytes are a pickle of their own
            others.add(key)
        else:
            tensors[key] = _tensor(key, _fields(facts, "metadata.TensorStorageMetadata"), places)
    return TensorMetadata(tensors, others)


_Places: TypeAlias = dict[tuple[str, Sizes], tuple[str, int, int]]
"""(key, offsets) -> (file, first byte, length)."""


def _places(storage: Mapping[Any, Any]) -> _Places:
    """Collects the positions of all slices; checks all files, even those that no tensor refers to."""
    places: _Places = {}
    for index, said in storage.items():
        name, info = _fields(index, "metadata.MetadataIndex"), _fields(said, "filesystem._StorageInfo")
        key, offsets = name.get("fqn"), name.get("offset")
        if not isinstance(key, str):
            raise ValueError("it has a place without a name")
        file = _plain_name(info.get("relative_path"))
        # torch may compress or encode what it writes; such bytes cannot be mapped as a tensor
        if info.get("transform_descriptors"):
            raise ValueError(f"{file} is transformed, which is not a plain file of the checkpoint")
        begin, length = _whole_number(info.get("offset")), _whole_number(info.get("length"))
        if offsets is not None:  # None: not a tensor
            places[key, _sizes(offsets)] = file, begin, length
    return places


def _plain_name(file: Any) -> str:
    if not isinstance(file, str):
        raise ValueError(f"it names a file by a value of type {type(file).__name__}")
    # a plain name cannot lead out of the checkpoint's folder
    if file in ("", ".", "..") or "/" in file or "\0" in file or len(file.encode()) > _LONGEST_NAME:
        raise ValueError(f"it names {file[:_LONGEST_NAME]!r}, which is not a plain file of the checkpoint")
    return file


def _tensor(key: str, facts: Mapping[str, Any], places: _Places) -> GlobalTensor:
    properties, chunks = facts.get("properties"), facts.get("chunks")
    # TensorProperties pickles as a tuple whose first element is the dtype (its __getstate__)
    if not isinstance(properties, Built) or not isinstance(properties.state, tuple) or not properties.state:
        raise ValueError(f"{key} has no properties")
    named = properties.state[0]
    if not isinstance(named, Named) or named.name not in _DTYPES:
        raise ValueError(f"{key} has no dtype")
    shape = _sizes(facts.get("size"))
    if not isinstance(chunks, list):
        raise ValueError(f"{key} has no list of slices")
    slices: dict[Sizes, SavedSlice] = {}
    for chunk in chunks:
        said = _fields(chunk, "metadata.ChunkStorageMetadata")
        at = TensorSlice(_sizes(said.get("offsets")), _sizes(said.get("sizes")))
        is_inside = len(at.offset) == len(at.shape) == len(shape) and all(
            first + size <= whole for first, size, whole in zip(*at, shape, strict=True)
        )
        if not is_inside or at.offset in slices:  # so there are no more slices than places, however often one is listed
            raise ValueError(f"{key} of shape {list(shape)} has a slice of {list(at.shape)} at {list(at.offset)}")
        if (key, at.offset) not in places:
            raise ValueError(f"it names no file for a part of {key}")
        slices[at.offset] = SavedSlice(at, *places[key, at.offset])
    return GlobalTensor(_DTYPES[named.name], shape, tuple(slices.values()))


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """Returns the fields of an object of one of torch's classes."""
    if not isinstance(value, Built) or value.name != _IN_TORCH + name or not isinstance(value.state, dict):
        shown = value.name if isinstance(value, Built) else type(value).__name__
        raise ValueError(f"it holds {shown} instead of {name}")
    return value.state


def _sizes(value: Any) -> Sizes:
    """Returns the sizes of a `torch.Size`."""
    if not isinstance(value, Built) or value.name != "torch.Size" or len(value.arguments) != 1:
        raise ValueError("it has no shape where one is due")
    (sizes,) = value.arguments
    if not isinstance(sizes, tuple) or len(sizes) > _MOST_AXES:
        raise ValueError("it has no shape where one is due")
    # below 2^63 so that torch's own sizes do not overflow
    if math.prod(_whole_number(size) for size in sizes) >= _MOST_ELEMENTS:
        raise ValueError("it has a shape of too many elements")
    return sizes


def _whole_number(value: Any) -> int:
    # type is, not isinstance: True is an int too
    if type(value) is not int or not 0 <= value < _MOST_ELEMENTS:
        raise ValueError("it has no whole number where one is due")
    return value
