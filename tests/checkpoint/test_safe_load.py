"""What is let through of a checkpoint's list of tensors."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mtrain.checkpoint.safe_load import verified_reader
from mtrain.errors import DataError


def metadata(file: str = "__0_0.distcp", transforms: list[str] | None = None, **changes: Any) -> Metadata:
    """One tensor in one file."""
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([2, 3]), [chunk])
    place = _StorageInfo(file, 0, 10, transform_descriptors=transforms)
    fields: dict[str, Any] = {
        "state_dict_metadata": {"weight": tensor},
        "storage_data": {MetadataIndex("weight", torch.Size([0, 0])): place},
        "storage_meta": StorageMeta(checkpoint_id=Path("/anywhere"), save_id="1"),
    }
    return Metadata(**{**fields, **changes})


def read(folder: Path, content: Any) -> Any:
    """What is found when `content` (or its pickle) is the list."""
    raw = content if isinstance(content, bytes) else pickle.dumps(content)
    (folder / ".metadata").write_bytes(raw)
    return verified_reader(folder)


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_a_list_of_tensors_is_read(tmp_path: Path) -> None:
    reader = read(tmp_path, metadata())
    assert reader.dtypes == {"weight": torch.bfloat16}
    assert reader.read_metadata().storage_data == metadata().storage_data


def test_paths_of_newer_pythons_are_read(tmp_path: Path) -> None:
    raw = pickle.dumps(metadata(), protocol=2)
    assert b"cpathlib\n" in raw
    assert read(tmp_path, raw.replace(b"cpathlib\n", b"cpathlib._local\n")).dtypes == {"weight": torch.bfloat16}


@pytest.mark.parametrize("depth", ["outside", "inside"])
def test_no_function_is_called(tmp_path: Path, depth: str) -> None:
    call = Calls(os.mkdir, str(tmp_path / "ran"))
    with pytest.raises(DataError, match=r"it asks for posix\.mkdir, which is refused"):
        read(tmp_path, call if depth == "outside" else metadata(planner_data={"a": [call]}))
    assert not (tmp_path / "ran").exists()


def test_no_method_of_a_permitted_module_is_called(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    with pytest.raises(DataError, match="refused"):
        read(tmp_path, Calls(FileSystem.rm_file, None, str(victim)))
    assert victim.exists()


@pytest.mark.parametrize("file", ["../other/__0_0.distcp", "/etc/passwd", "inner/__0_0.distcp", "..", ""])
def test_no_file_elsewhere_is_named(tmp_path: Path, file: str) -> None:
    with pytest.raises(DataError, match="not a plain file of the checkpoint"):
        read(tmp_path, metadata(file))


def test_no_transformation_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a plain file"):
        read(tmp_path, metadata(transforms=["stream.zstd"]))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        pickle.dumps(metadata())[:-40],
        {"a": 1},
        metadata(storage_data=None),
        metadata(storage_data={1: 2}),
    ],
    ids=["empty", "garbage", "cut", "a dict", "no files", "other files"],
)
def test_what_is_no_list_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(DataError, match="is not a list of tensors"):
        read(tmp_path, content)


def test_a_missing_list_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        verified_reader(tmp_path)
