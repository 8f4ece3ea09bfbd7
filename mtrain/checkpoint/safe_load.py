"""Reads the list of tensors of a checkpoint without running anything that it holds.

torch keeps that list, `.metadata`, as a pickle, and a pickle can name any function to call. Only the few classes that
such a list consists of are let through. The tensors themselves are read by torch with `weights_only`, and nothing else
of a checkpoint is unpickled.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mtrain.errors import DataError

_METADATA = ".metadata"
_PLAIN_CLASSES = {
    "builtins": {"set"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}
"""Module -> names that hold data and do nothing when they are made; the last line as megatron-core's own writer adds
its plans."""


class VerifiedReader(FileSystemReader):
    """torch's reader with a list of tensors that has been checked."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.folder, self.metadata = folder, metadata

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Name of each saved tensor -> its dtype."""
        saved = self.metadata.state_dict_metadata.items()
        return {key: facts.properties.dtype for key, facts in saved if isinstance(facts, TensorStorageMetadata)}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checked list."""
        return self.metadata


def verified_reader(folder: Path) -> VerifiedReader:
    """Opens a checkpoint in `torch_dist` format.

    Raises:
        DataError: The list of tensors is missing, damaged, would run code, or names files elsewhere.
    """
    path = folder / _METADATA
    try:
        with path.open("rb") as file:
            metadata = _DataUnpickler(file).load()
        _check(metadata)
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, IndexError, KeyError) as fault:
        raise DataError(f"{path} is not a list of tensors: {fault}; restore the checkpoint or use another") from fault
    return VerifiedReader(folder, metadata)


def _check(metadata: Metadata) -> None:
    if not isinstance(metadata, Metadata):
        raise ValueError(f"it holds {type(metadata).__name__}")
    for place in metadata.storage_data.values():
        name = place.relative_path
        if PurePosixPath(name).parts != (name,) or name == ".." or place.transform_descriptors:
            raise ValueError(f"it names {name!r}, which is not a plain file of the checkpoint")


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # where Python 3.13 keeps the same classes
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _PLAIN_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")
